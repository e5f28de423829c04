"""The Grafana dashboard: written by its script, over the catalogue's series, with nothing left unlabelled or overlapping."""

from __future__ import annotations

import itertools
import re
import runpy
from typing import Any

import pytest

from pagedcore.observe.catalogue import FAMILIES
from support.deployed import DASHBOARD, OBSERVABILITY, PanelQuery, dashboard, panel_queries, read_yaml
from support.promql import family_of, faults, grouped_by, series_names

GRAFANA = OBSERVABILITY / "grafana"
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
GRID_WIDTH = 24
ROWS = ["Health", "Cache", "Latency", "Memory", "Scheduler", "Tenants"]
NOT_SHOWN: set[str] = {"pagedcore_cache_hit_rate", "pagedcore_cache_level_hit_rate", "pagedcore_cache_ideal_hit_rate"}
"""Rates since start or of the last minute: the panels have them from their counters, over the time that is looked at."""

of_each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def test_the_file_is_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GRAFANA))
    script = runpy.run_path(str(GRAFANA / "make_dashboard.py"))
    assert script["text"]() == DASHBOARD.read_text(encoding="utf-8"), "run deploy/observability/grafana/make_dashboard.py"


@pytest.mark.parametrize("query", panel_queries(), ids=str)
def test_queries_read_series_and_labels_of_the_catalogue(query: PanelQuery) -> None:
    assert faults(query.expr) == []


@pytest.mark.parametrize("query", panel_queries(), ids=str)
def test_every_series_is_of_the_chosen_model_and_engine(query: PanelQuery) -> None:
    selectors = re.findall(r"pagedcore_\w+(\{[^}]*\})?", query.expr)
    assert selectors and all(one.startswith('{model_name=~"$model_name", engine=~"$engine"') for one in selectors)


@pytest.mark.parametrize("query", panel_queries(), ids=str)
def test_legends_name_the_labels_that_lines_differ_by(query: PanelQuery) -> None:
    if query.panel != "Living engines":  # a table has a column for each
        assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) == grouped_by(query.expr) - ({"le"} if "quantile" in query.expr else set())


def test_every_family_is_shown() -> None:
    shown = {family.name for query in panel_queries() for name in series_names(query.expr) if (family := family_of(name))}
    assert set(FAMILIES) - shown == NOT_SHOWN


@of_each_panel
def test_every_panel_has_a_unit_and_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"


@of_each_panel
def test_panels_of_several_lines_name_each(panel: dict[str, Any]) -> None:
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)
    assert panel["type"] in ("stat", "table") or all(legends)


def test_titles_and_ids_are_unique() -> None:
    panels = dashboard()["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS


def test_panels_fit_the_grid_and_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for x, y in itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < GRID_WIDTH


def test_the_variables_are_source_model_and_engine() -> None:
    variables = dashboard()["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "model_name", "engine"]
    assert [fault for variable in variables[1:] for fault in faults(variable["query"]["query"])] == []


def test_grafana_finds_the_dashboard_and_its_source_by_files() -> None:
    (source,) = read_yaml(GRAFANA / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    (provider,) = read_yaml(GRAFANA / "provisioning" / "dashboards" / "pagedcore.yml")["providers"]
    scrape_interval = read_yaml(OBSERVABILITY / "prometheus.yml")["global"]["scrape_interval"]
    assert (source["type"], source["isDefault"], source["jsonData"]["timeInterval"]) == ("prometheus", True, scrape_interval)
    assert provider["type"] == "file"
