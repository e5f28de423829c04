"""The files of deploy/ as tests read them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.repository import ROOT

DEPLOY = ROOT / "deploy"
OBSERVABILITY = DEPLOY / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "dashboards" / "pagedcore.json"


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(file_name: str) -> list[dict[str, Any]]:
    """The rules of a file of observability/rules, in their order."""
    return [rule for group in read_yaml(OBSERVABILITY / "rules" / file_name)["groups"] for rule in group["rules"]]


def recorded_names() -> frozenset[str]:
    return frozenset(rule["record"] for rule in rules("recording.yml"))


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of one panel of the dashboard."""

    panel: str
    legend: str
    expr: str

    def __str__(self) -> str:
        return f"{self.panel}: {self.legend}" if self.legend else self.panel


def panel_queries() -> list[PanelQuery]:
    """Every query of the dashboard, in the order of its panels."""
    return [
        PanelQuery(panel["title"], target["legendFormat"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
