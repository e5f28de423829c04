"""A real Prometheus scrapes a live endpoint under traffic: every panel of the dashboard has something to show, every rule works."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagedcore.metrics_compat.vllm_names import VLLM_FAMILIES
from pagedcore.observe.catalogue import Family
from support import small_pool_app
from support.deployed import PanelQuery, dashboard, panel_queries, recorded_names
from support.prometheus_server import RATE_INTERVAL, Prometheus, prometheus, traffic
from support.served import POLL_S, free_port, serve, wait_until

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed: apt-get install prometheus"),
]

TRAFFIC_S, MAX_TRAFFIC_S = 6.0, 90.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A Prometheus, and when the traffic was that it saw."""

    prometheus: Prometheus
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    with (
        serve([str(Path(small_pool_app.__file__)), str(port)], folder / "app.log", port=port) as served,
        prometheus(f"127.0.0.1:{port}", folder) as server,
    ):
        wait_until(lambda: server.values_now("up") == [1.0], 60, "a scrape")
        start_s = time.time()
        with traffic(served.url):
            while (past_s := time.time() - start_s) < TRAFFIC_S or (past_s < MAX_TRAFFIC_S and not shows_all(server, start_s)):
                time.sleep(POLL_S)
        yield Watched(server, start_s, time.time())


def shows_all(server: Prometheus, start_s: float) -> bool:
    """Whether every panel has something to show; a slow machine scrapes less often, and needs longer."""
    return all(any(server.values_between(chosen(query.expr), start_s, time.time())) for query in panel_queries())


def chosen(expr: str) -> str:
    """The expression as Grafana sends it with one model and all engines chosen."""
    return expr.replace("$model_name", "fake").replace("$engine", ".*").replace("$__rate_interval", RATE_INTERVAL)


@pytest.mark.parametrize("query", panel_queries(), ids=str)
def test_no_panel_is_empty_under_traffic(watched: Watched, query: PanelQuery) -> None:
    values = watched.prometheus.values_between(chosen(query.expr), watched.start_s, watched.end_s)
    assert values, f"{query} shows nothing: {chosen(query.expr)}"
    assert any(values), f"{query}: only zeros"


@pytest.mark.parametrize("family", VLLM_FAMILIES.values(), ids=lambda family: family.name)
def test_the_names_of_vllm_are_there_too(watched: Watched, family: Family) -> None:
    name = family.name + ("_count" if family.kind == "histogram" else "")
    values = watched.prometheus.values_between(name, watched.start_s, watched.end_s)
    assert values
    assert any(values)


def test_every_tenant_and_class_with_requests_has_an_error_rate(watched: Watched) -> None:
    ended, failed = (
        watched.prometheus.labels_between(chosen(query.expr), watched.start_s, watched.end_s)
        for query in panel_queries()
        if query.panel.endswith("by tenant and class")
    )
    assert ended == failed
    assert {dict(labels)["class"] for labels in ended} == {"nightly", "unnamed"}
    assert {dict(labels)["tenant"] for labels in ended} == {*small_pool_app.KEYS.values(), "unnamed"}


@pytest.mark.parametrize("label", ["model_name", "engine"])
def test_the_variables_offer_what_serves(watched: Watched, label: str) -> None:
    (variable,) = [one for one in dashboard()["templating"]["list"] if one["name"] == label]
    selector = variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
    values = watched.prometheus.get(f"label/{label}/values", **{"match[]": chosen(selector)})
    assert values == [{"model_name": "fake", "engine": "0"}[label]]


def test_every_rule_is_evaluated_without_fault(watched: Watched) -> None:
    def of_rules(key: str) -> list[str]:
        return [rule[key] for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: "unknown" not in of_rules("health"), 60, "a first evaluation of every rule")
    assert set(of_rules("health")) == {"ok"}
    assert len(of_rules("name")) > len(recorded_names()) > 0


@pytest.mark.parametrize("name", sorted(recorded_names()))
def test_every_recorded_series_has_values_under_traffic(watched: Watched, name: str) -> None:
    wait_until(lambda: any(watched.prometheus.values_now(name)), 60, f"a value of {name} that is not 0")


def test_a_living_engine_is_not_taken_for_dead(watched: Watched) -> None:
    def alerts() -> set[str]:
        return {alert["labels"]["alertname"] for alert in watched.prometheus.get("alerts")["alerts"]}

    # A scrape may have been late while the machine was busy.
    wait_until(lambda: not alerts() & {"PagedCoreEngineDead", "PagedCoreQueueStuck"}, 60, "no alert of a dead engine")
