"""PromQL over the catalogue, and Grafana panels that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'model_name=~"$model_name", engine=~"$engine"'
"""What the variables of the dashboard choose."""

Kind = Literal["timeseries", "stat", "heatmap", "table"]


def series(name: str, **labels: str) -> str:
    """The chosen engines' series; a label value that starts with ~ is a pattern."""
    chosen = [f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"' for label, value in labels.items()]
    return f"pagedcore_{name}{{{', '.join([SELECTED, *chosen])}}}"


def total(name: str, by: str = "", **labels: str) -> str:
    """The sum of a gauge."""
    return f"{_sum(by)} ({series(name, **labels)})"


def rate(name: str, by: str = "", **labels: str) -> str:
    """A counter's growth in a second."""
    return f"{_sum(by)} (rate({series(name, **labels)}[$__rate_interval]))"


def quantile(q: float, name: str) -> str:
    """Of all observations of a histogram, over the engines."""
    return f"histogram_quantile({q:g}, {rate(name + '_bucket', by='le')})"


def mean(name: str) -> str:
    """Of all observations of a histogram."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def named(expr: str, *labels: str) -> str:
    """Requests without a tenant or class have the label "unnamed" there, so that legends can be read."""
    for label in labels:
        expr = f'label_replace({expr}, "{label}", "unnamed", "{label}", "")'
    return expr


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one line for each value of the labels that the legend names."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `help` is the text behind its (i)."""

    title: str
    help: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stacked: bool = False
    maximum: float | None = None
    steps: tuple[tuple[float | None, str], ...] = ()
    """(from which value, which colour), the first from None."""
    width: int = 8
    height: int = 8

    def as_json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """As Grafana reads it, at a place of its grid, which is 24 wide."""
        panel: dict[str, Any] = {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.help,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [self._target(index, query) for index, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
        }
        if self.kind == "table":  # a row is its labels
            panel["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}]
        return panel

    def _target(self, index: int, query: Query) -> dict[str, Any]:
        formats: dict[Kind, str] = {"heatmap": "heatmap", "table": "table"}
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "format": formats.get(self.kind, "time_series"),
            "instant": self.kind == "table",
            "range": self.kind != "table",
        }

    def _defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": self.unit, "noValue": "-"}
        if self.kind == "timeseries":
            defaults["min"] = 0
            defaults["custom"] = {
                "lineWidth": 1,
                "fillOpacity": 40 if self.stacked else 5,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            }
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.steps:
            defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in self.steps]}
        return defaults


_OPTIONS: dict[Kind, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "orientation": "auto",
        "justifyMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 32},
        "yAxis": {"unit": "s"},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}
