"""A comparison for people: a table, and a sentence of what it means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pagedcore.commands.comparison import Comparison, ModelReport, TrafficReport, ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = tuple[str, str, str, str]
"""Name, A, B, and B relative to A."""


def show(console: Console, comparison: Comparison) -> None:
    """Print the table, its caption and the sentence."""
    console.print(_table(comparison))
    console.print(meaning(comparison), highlight=False, soft_wrap=True)


def rows(comparison: Comparison) -> list[Row]:
    """Quality, size and speed."""
    a, b, agreement = comparison.a, comparison.b, comparison.agreement
    return [
        ("model", a.model, b.model, ""),
        ("quantization", a.quantization or "none", b.quantization or "none", ""),
        ("matrix products", a.linear_backend, b.linear_backend, ""),
        ("perplexity", f"{a.perplexity:,.3f}", f"{b.perplexity:,.3f}", _change(comparison.relative("perplexity"))),
        ("KL(A || B), mean", "", f"{agreement.mean_kl_nats:.5f} nats", ""),
        ("KL(A || B), 99th percentile", "", f"{agreement.p99_kl_nats:.5f} nats", ""),
        ("likeliest token is A's", "", f"{agreement.top1_fraction:.1%}", ""),
        ("weight files", *_sizes(a.checkpoint_bytes, b.checkpoint_bytes)),
        ("weights in memory", *_sizes(a.weight_bytes, b.weight_bytes)),
        ("output tokens per second", *_speeds(a, b)),
        (f"slowest and fastest of {_counted(comparison.speed.num_rounds, 'round')}", _spread(a), _spread(b), ""),
        ("time to first token, p50", *_first_tokens(a, b)),
    ]


def traffic_rows(a: TrafficReport, b: TrafficReport) -> list[Row]:
    """The requests of the traffic file."""
    rates = ((level, getattr(a, f"{level}_hit_rate"), getattr(b, f"{level}_hit_rate")) for level in ("page", "prefix", "pool"))
    return [
        *((f"hit rate, {level}", _share(of_a), _share(of_b), _points(of_a, of_b)) for level, of_a, of_b in rates),
        ("KV cache", *_sizes(a.kv_cache_bytes, b.kv_cache_bytes)),
        ("KV blocks", f"{a.num_blocks:,}", f"{b.num_blocks:,}", _times(ratio(b.num_blocks, a.num_blocks))),
        ("tokens the pool holds", f"{a.pool_tokens:,}", f"{b.pool_tokens:,}", _times(ratio(b.pool_tokens, a.pool_tokens))),
        ("output tokens per second", *_speeds(a, b)),
        ("time to first token, p50", *_first_tokens(a, b)),
    ]


def caption(comparison: Comparison) -> str:
    """Where, and on what, the numbers were measured."""
    text, speed, traffic = comparison.text, comparison.speed, comparison.traffic
    machine = " and ".join(dict.fromkeys(f"{side.device}, {side.dtype}" for side in (comparison.a, comparison.b)))
    windows = f"{_counted(text.num_windows, 'window')} of at most {text.window_tokens:,}"
    prompts = f"{_counted(speed.num_prompts, 'prompt')} of {speed.prompt_tokens} tokens"
    lines = [
        f"{machine}. {text.num_text_tokens:,} tokens of text, {comparison.agreement.num_scored_tokens:,} scored.",
        f"Scored in {windows}, each from an empty cache; the first token of a window is not scored.",
        f"Speed: {prompts} at once, {speed.output_tokens} output tokens each; median of {_counted(speed.num_rounds, 'round')}.",
    ]
    if text.num_left_out_logits:
        lines.append(f"Compared over {text.vocab_size:,} logits: the {text.num_left_out_logits:,} more of one model are padding.")
    if traffic is not None:
        requests = f"{_counted(traffic.num_requests, 'request')} of {traffic.num_prompt_tokens:,} tokens in all"
        lines.append(f"Traffic: {requests}, {traffic.concurrency} at a time, {traffic.output_tokens} output tokens each.")
    return "\n".join(lines)


def meaning(comparison: Comparison) -> str:
    """The numbers in one plain sentence; a second one about the traffic."""
    a, b = comparison.a.traffic, comparison.b.traffic
    parts = [
        f"B's perplexity is {_higher(comparison.relative('perplexity'))}",
        f"its likeliest token is A's in {comparison.agreement.top1_fraction:.1%} of positions",
        f"its weights take {_percent(comparison.relative('weight_bytes'))} of A's memory",
        _speed_verdict(comparison),
    ]
    sentence = "; ".join(parts) + "."
    if a is not None and b is not None:
        sentence += (
            f" On the same requests its prefix cache served {_share(b.prefix_hit_rate)} of the prompt tokens "
            f"(A's {_share(a.prefix_hit_rate)}), and its pool holds {b.pool_tokens:,} tokens (A's {a.pool_tokens:,})."
        )
    return sentence


def _table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(title="pagedcore compare", title_justify="left", caption=caption(comparison), caption_justify="left")
    for header in ("", "A", "B", "B to A"):
        table.add_column(header, overflow="fold")
    for row in rows(comparison):
        table.add_row(*row)
    if comparison.a.traffic is not None and comparison.b.traffic is not None:
        table.add_section()
        table.add_row("traffic")
        for row in traffic_rows(comparison.a.traffic, comparison.b.traffic):
            table.add_row(*row)
    return table


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _sizes(a: int, b: int) -> tuple[str, str, str]:
    from rich.filesize import decimal

    return decimal(a), decimal(b), _percent(ratio(b, a))


def _speeds(a: ModelReport | TrafficReport, b: ModelReport | TrafficReport) -> tuple[str, str, str]:
    of_a, of_b = a.output_tokens_per_s, b.output_tokens_per_s
    return f"{of_a:,.1f}", f"{of_b:,.1f}", _times(ratio(of_b, of_a))


def _spread(report: ModelReport) -> str:
    return f"{report.slowest_output_tokens_per_s:,.1f} to {report.fastest_output_tokens_per_s:,.1f}"


def _speed_verdict(comparison: Comparison) -> str:
    if comparison.speeds_overlap():
        return f"its speed here is A's within the spread of {_counted(comparison.speed.num_rounds, 'round')}"
    return f"it is {_times(comparison.relative('output_tokens_per_s'))} as fast here"


def _first_tokens(a: ModelReport | TrafficReport, b: ModelReport | TrafficReport) -> tuple[str, str, str]:
    of_a, of_b = a.first_token_p50_s, b.first_token_p50_s
    return f"{1000 * of_a:,.1f} ms", f"{1000 * of_b:,.1f} ms", _times(ratio(of_b, of_a))


def _change(relative: float | None) -> str:
    return "-" if relative is None or not math.isfinite(relative) else f"{relative - 1:+.1%}"


def _higher(relative: float | None) -> str:
    """As in: is 12.3 % higher."""
    if relative is None or not math.isfinite(relative):
        return "not to be compared with A's"
    shown = f"{abs(relative - 1):.1%}"
    if shown == "0.0%":
        return "the same to 0.1%"
    return f"{shown} {'higher' if relative > 1 else 'lower'}"


def _percent(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.0%}"


def _times(relative: float | None) -> str:
    return "-" if relative is None else f"{relative:.2f} x"


def _share(rate: float) -> str:
    return f"{rate:.1%}" if math.isfinite(rate) else "-"


def _points(a: float, b: float) -> str:
    difference = 100 * (b - a)
    return f"{difference:+.1f} points" if math.isfinite(difference) else "-"
