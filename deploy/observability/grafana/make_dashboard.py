"""Writes dashboards/pagedcore.json: `python deploy/observability/grafana/make_dashboard.py`. Change panels here, not in the JSON."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from panels import DATASOURCE, SELECTED, Panel, Query, mean, named, quantile, rate, series, total

FILE = Path(__file__).parent / "dashboards" / "pagedcore.json"

GOOD_ABOVE_70 = ((None, "orange"), (0.70, "green"))
HIT_RATE = ((None, "red"), (0.70, "orange"), (0.85, "green"))
UNDER_A_SECOND = ((None, "green"), (1.0, "red"))
NONE_IS_GOOD = ((None, "green"), (1.0, "orange"))
FAILURES = ((None, "green"), (0.01, "red"))
NEUTRAL = ((None, "blue"),)

COUNT = "short"
TOKENS = "suffix:tok/s"
BLOCKS = "suffix:blocks/s"

FAILED = "~error|rejected"
_QUERIED = rate("prefix_cache_queries_tokens_total")
_HIT_RATE = f"{rate('prefix_cache_hit_tokens_total')} / {_QUERIED}"
_IDEAL = f"{rate('prefix_cache_ideal_hit_tokens_total')} / {_QUERIED}"


def _stat(title: str, help_text: str, unit: str, expr: str, steps: Any, width: int = 3) -> Panel:
    return Panel(title=title, help=help_text, unit=unit, queries=(Query(expr),), kind="stat", steps=steps, width=width, height=4)


def _quantiles(title: str, help_text: str, name: str, width: int = 8) -> Panel:
    queries = (Query(quantile(0.5, name), "p50"), Query(quantile(0.9, name), "p90"), Query(quantile(0.99, name), "p99"))
    return Panel(title=title, help=help_text, unit="s", queries=queries, width=width)


HEALTH = (
    _stat("Engines", "Living engines. Each worker or replica has one.", COUNT, total("engine_info"), ((None, "red"), (1.0, "green"))),
    _stat(
        "Device busy", "Step time over wall time, mean of the engines. Target: above 70 % while there is traffic.", "percentunit",
        f"avg(rate({series('step_seconds_sum')}[$__rate_interval]))", GOOD_ABOVE_70,
    ),
    _stat("Running", "Requests in the batch.", COUNT, total("open_requests", state="running"), NEUTRAL),
    _stat("Blocked", "Requests that wait. Target: none.", COUNT, total("open_requests", state="waiting"), NONE_IS_GOOD),
    _stat(
        "Cache hit rate", "Prompt tokens that were not computed. Target: above 85 %, or 85 % of the ideal.", "percentunit",
        _HIT_RATE, HIT_RATE,
    ),
    _stat("Ideal hit rate", "What an unbounded cache would give on the same prompts.", "percentunit", _IDEAL, NEUTRAL),
    _stat(
        "First token, p99", "Arrival to first token. Target: under 1 s.", "s",
        quantile(0.99, "time_to_first_token_seconds"), UNDER_A_SECOND,
    ),
    _stat(
        "Failed requests", "Requests that ended as error or rejected, of all that ended.", "percentunit",
        f"{rate('requests_total', status=FAILED)} / {rate('requests_total')}", FAILURES,
    ),
    Panel(
        title="Tokens per second", help="Prompt tokens of admitted requests, cached ones included, and output tokens of ended ones.",
        unit=TOKENS,
        queries=(Query(rate("prompt_tokens_total"), "prompt"), Query(rate("generation_tokens_total"), "output")), width=8,
    ),
    Panel(
        title="Requests per second", help="Received ones, and ended ones by how they ended; in time they are as many.", unit="reqps",
        queries=(Query(rate("received_requests_total"), "received"), Query(rate("requests_total", by="status"), "{{status}}")), width=8,
    ),
    Panel(
        title="Living engines", help="What each is made of.", unit="none", kind="table",
        queries=(Query(
            "max by (instance, model_name, engine, version, device, backend, linear_backend, dtype, quantization, kv_cache_dtype, "
            "block_size, num_blocks)"
            f" ({series('engine_info')} == 1)"
        ),), width=8,
    ),
)  # fmt: skip

CACHE = (
    Panel(
        title="Hit rate by level",
        help="page: eligible blocks that were there. prefix: prompt tokens not computed. pool: block acquisitions served by a cached block."
        " Page above prefix shows holes: the head of a prefix was evicted before its tail. ideal: an unbounded cache.",
        unit="percentunit", maximum=1.0, width=12,
        queries=(
            Query(f"{rate('page_hits_total')} / {rate('page_lookups_total')}", "page"),
            Query(_HIT_RATE, "prefix"),
            Query(f"{rate('pool_acquired_blocks_total', kind='reused')} / {rate('pool_acquired_blocks_total')}", "pool"),
            Query(_IDEAL, "ideal"),
        ),
    ),
    Panel(
        title="Where prompt tokens came from",
        help="live: from blocks that another request held. pool: from blocks without an owner. host: copied back from host memory."
        " abandoned: the request ended first.",
        unit=TOKENS, stacked=True, width=12,
        queries=(
            Query(rate("prefix_cache_hit_tokens_total", by="source"), "{{source}}"),
            Query(rate("computed_prompt_tokens_total"), "computed"),
            Query(rate("abandoned_prompt_tokens_total"), "abandoned"),
        ),
    ),
    Panel(
        title="Misses by reason",
        help="Blocks per second that were not served. evicted: was here and was dropped. in_flight: another request computes it now."
        " hole: is here, behind a missing block. diverged: the prompt parts from a cached one. short: it shares less than a block."
        " isolated: the same tokens are here under another salt or tenant."
        " cold: never seen. disabled: caching was off for the request.",
        unit=BLOCKS, stacked=True, queries=(Query(rate("cache_miss_blocks_total", by="reason"), "{{reason}}"),),
    ),
    Panel(
        title="Miss penalty", help="Share of step time spent on tokens that had been computed before.", unit="percentunit", stacked=True,
        queries=(Query(
            f"{rate('miss_penalty_seconds_total', by='reason')} / on () group_left () {rate('step_seconds_sum')}", "{{reason}}"
        ),),
    ),
    Panel(
        title="Tokens computed twice", help="Tokens per second whose block had been computed before.", unit=TOKENS, stacked=True,
        queries=(Query(rate("miss_penalty_tokens_total", by="reason"), "{{reason}}"),),
    ),
    Panel(
        title="Evictions",
        help="Blocks per second that lost their content to make room, and misses on blocks that had been evicted a short time before:"
        " those a larger pool would have served.",
        unit=BLOCKS,
        queries=(Query(rate("pool_evictions_total"), "evicted"), Query(rate("pool_ghost_hits_total"), "missed after eviction")),
    ),
    Panel(
        title="Age of evicted blocks",
        help="Median time from the filling of a block to its eviction, from its last use to its eviction, and between two uses."
        " Idle time shorter than the gap between uses: the pool is too small.",
        unit="s",
        queries=(
            Query(quantile(0.5, "block_lifetime_seconds"), "lifetime"),
            Query(quantile(0.5, "block_idle_seconds"), "idle before eviction"),
            Query(quantile(0.5, "block_reuse_gap_seconds"), "gap between uses"),
        ),
    ),
    Panel(
        title="Reuse of evicted blocks", help="How often a block was used by others than its writer before it was evicted, on average.",
        unit=COUNT, queries=(Query(mean("block_reuses"), "uses"),),
    ),
)  # fmt: skip

LATENCY = (
    _quantiles("Time to first token", "Arrival to first token.", "time_to_first_token_seconds"),
    _quantiles("Time in queue", "Arrival to first admission.", "time_in_queue_seconds"),
    _quantiles("Request latency", "Arrival to end, of every request but rejected ones.", "request_latency_seconds"),
    _quantiles("Inter-token latency", "Between two tokens of one output.", "inter_token_latency_seconds"),
    _quantiles("Time per output token", "(last - first token) / (tokens - 1), one an output.", "time_per_output_token_seconds"),
    Panel(
        title="Time to first token, spread", help="First tokens per second, by how long they took.", unit="none", kind="heatmap",
        queries=(Query(rate("time_to_first_token_seconds_bucket", by="le"), "{{le}}"),),
    ),
)  # fmt: skip

MEMORY = (
    Panel(
        title="Blocks by state", help="active: owned by a request. cached: no owner, content kept. free: empty.", unit=COUNT, stacked=True,
        queries=(Query(total("blocks", by="state"), "{{state}}"),), width=6,
    ),
    Panel(
        title="Use of the KV cache",
        help="usage: active blocks of all. utilization: live tokens of the slots of active blocks; the rest are ends of last blocks.",
        unit="percentunit", maximum=1.0, width=6,
        queries=(
            Query(f"avg({series('kv_cache_usage_ratio')})", "usage"), Query(f"avg({series('kv_utilization_ratio')})", "utilization"),
        ),
    ),
    Panel(
        title="Device memory", help="What the engines hold on their devices.", unit="bytes", stacked=True, width=6,
        queries=(Query(total("device_memory_bytes", by="kind", kind="~weights|kv_cache|graphs|activations"), "{{kind}}"),),
    ),
    Panel(
        title="Swapped blocks", help="Blocks per second copied to host memory (out) and back (in).", unit=BLOCKS, width=6,
        queries=(Query(rate("swapped_blocks_total", by="direction"), "{{direction}}"),),
    ),
)  # fmt: skip

SCHEDULER = (
    Panel(
        title="Requests by state", help="Each choice of n counts.", unit=COUNT, stacked=True,
        queries=(Query(total("open_requests", by="state"), "{{state}}"),),
    ),
    Panel(
        title="Waiting by reason",
        help="blocks: no KV memory is left. max_num_seqs: the batch is full. token_budget: the step is full. tenant_quota: the tenant has"
        " all rows of max_running_per_tenant, or its share of the cache. priority: others go first.",
        unit=COUNT, stacked=True, queries=(Query(total("waiting_requests", by="reason"), "{{reason}}"),),
    ),
    Panel(
        title="Rejected by reason", help="Requests per second that were refused before they ran.", unit="reqps", stacked=True,
        queries=(Query(rate("rejected_requests_total", by="reason"), "{{reason}}"),),
    ),
    Panel(
        title="Preemptions", help="Requests per second that gave their blocks back, to be computed again.", unit="ops",
        queries=(Query(rate("preemptions_total"), "preemptions"),),
    ),
    Panel(
        title="Wasted tokens",
        help="Tokens per second. recomputed: after a preemption. discarded: generated past a stop string, or when the request had ended.",
        unit=TOKENS, queries=(Query(rate("recomputed_tokens_total"), "recomputed"), Query(rate("discarded_tokens_total"), "discarded")),
    ),
    Panel(
        title="Batch", help="Tokens and sequences of a step, on average.", unit=COUNT,
        queries=(Query(mean("step_tokens"), "tokens"), Query(mean("step_sequences"), "sequences")),
    ),
    _quantiles("Step time", "One device step, from its start to its commit.", "step_seconds"),
    _quantiles(
        "Gap between steps", "From a commit to the start of the next step while requests run: the device idles.", "step_gap_seconds",
    ),
    Panel(
        title="Device time",
        help="steps: step time over wall time. driver: share of time in which a kernel ran, whoever's, by the device's driver (NVML); it is"
        " not there on a CPU.",
        unit="percentunit", maximum=1.0,
        queries=(
            Query(f"avg(rate({series('step_seconds_sum')}[$__rate_interval]))", "steps"),
            Query(f"avg({series('device_utilization_ratio')})", "driver"),
        ),
    ),
)  # fmt: skip

_ENDED = rate("requests_total", by="tenant, class")
_FAILED = rate("requests_total", by="tenant, class", status=FAILED)

TENANTS = (
    Panel(
        title="Requests per second by tenant and class", help="Ended requests.", unit="reqps", stacked=True, width=12,
        queries=(Query(named(_ENDED, "tenant", "class"), "{{tenant}} / {{class}}"),),
    ),
    Panel(
        title="Error rate by tenant and class", help="Requests that ended as error or rejected, of all that ended.", unit="percentunit",
        width=12,
        queries=(Query(named(f"({_FAILED} or 0 * {_ENDED}) / {_ENDED}", "tenant", "class"), "{{tenant}} / {{class}}"),),
    ),
    Panel(
        title="Prompt tokens by tenant", help="Tokens per second of admitted requests, cached ones included.", unit=TOKENS, stacked=True,
        queries=(Query(named(rate("prompt_tokens_total", by="tenant"), "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Output tokens by tenant", help="Tokens per second of ended requests.", unit=TOKENS, stacked=True,
        queries=(Query(named(rate("generation_tokens_total", by="tenant"), "tenant"), "{{tenant}}"),),
    ),
    Panel(
        title="Cache hit rate by tenant", help="Prompt tokens of a tenant that were not computed.", unit="percentunit", maximum=1.0,
        queries=(Query(
            named(
                f"{rate('prefix_cache_hit_tokens_total', by='tenant')} / {rate('prefix_cache_queries_tokens_total', by='tenant')}", "tenant"
            ),
            "{{tenant}}",
        ),),
    ),
)  # fmt: skip

ROWS = (("Health", HEALTH), ("Cache", CACHE), ("Latency", LATENCY), ("Memory", MEMORY), ("Scheduler", SCHEDULER), ("Tenants", TENANTS))


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as its file holds it."""
    return {
        "uid": "pagedcore",
        "title": "pagedcore",
        "tags": ["pagedcore", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _variable("model_name", ""), _variable("engine", '{model_name=~"$model_name"}')]},
        "annotations": {"list": [_firing_alerts()]},
        "panels": _laid_out(),
    }


def _laid_out() -> list[dict[str, Any]]:
    """The rows below each other, their panels from left to right."""
    placed: list[dict[str, Any]] = []
    ids, y = count(1), 0
    for title, panels in ROWS:
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        placed.append({"id": next(ids), "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []})
        y, x = y + 1, 0
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + placed[-1]["gridPos"]["h"]
            placed.append(panel.as_json(next(ids), x, y))
            x += panel.width
        y += placed[-1]["gridPos"]["h"]
    return placed


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "hide": 0}


def _variable(label: str, chosen: str) -> dict[str, Any]:
    """A choice among the values of a label of living engines; all of them at first."""
    query = f"label_values(pagedcore_engine_info{chosen}, {label})"
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _firing_alerts() -> dict[str, Any]:
    """Marks in every panel while an alert of rules/alerts.yml fires."""
    return {
        "name": "Firing alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "target": {"refId": "alerts", "expr": f'ALERTS{{alertname=~"PagedCore.*", alertstate="firing", {SELECTED}}}', "interval": "60s"},
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{engine}}",
    }


def text() -> str:
    """What the file holds."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
