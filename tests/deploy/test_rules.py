"""The rules of deploy/observability: they name what the catalogue has, each alert says what to do, and promtool's unit tests pass."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from typing import Any

import pytest

from pagedcore import cli
from pagedcore.config import EngineConfig
from pagedcore.console.indicators import Targets
from pagedcore.observe.catalogue import FAMILIES
from pagedcore.sampling_params import SamplingParams
from support.deployed import OBSERVABILITY, read_yaml, recorded_names, rules
from support.promql import TARGET_LABELS, faults, series_names

ALERTS = rules("alerts.yml")
RECORDED = rules("recording.yml")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")

_TEMPLATE = re.compile(r"\{\{(.*?)\}\}")
_IDENTIFIER = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
_VALUE = re.compile(r" \$value( \| humanize(Percentage|Duration)?)? ")


def alert(name: str) -> dict[str, Any]:
    (found,) = [rule for rule in ALERTS if rule["alert"] == name]
    return found


def promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", *arguments], cwd=OBSERVABILITY, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rule", ALERTS + RECORDED, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_read_series_and_labels_of_the_catalogue(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"], recorded_names()) == []


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("rate(pagedcore_cache_hits_total[5m])", "no metric pagedcore_cache_hits_total"),
        ("pagedcore_step_seconds", "no metric pagedcore_step_seconds"),
        ("pagedcore_blocks_bucket", "no metric pagedcore_blocks_bucket"),
        ("pagedcore:no_such_rule:rate5m", "no metric pagedcore:no_such_rule:rate5m"),
        ('pagedcore_blocks{status="free"}', "pagedcore_blocks has no label status"),
        ('pagedcore_blocks{state=~"free|busy"}', "pagedcore_blocks has no state busy"),
        ("sum by (tenant) (pagedcore_blocks)", "no label tenant"),
    ],
)
def test_a_name_that_the_catalogue_does_not_have_is_found(expr: str, fault: str) -> None:
    assert faults(expr) == [fault]


def test_every_recorded_series_is_read_by_a_rule() -> None:
    read = {name for rule in ALERTS + RECORDED for name in series_names(rule["expr"])}
    assert recorded_names() - read == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_it_saw_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert sorted(rule["annotations"]) == ["description", "remedy", "summary"]
    assert len(rule["annotations"]["remedy"]) > 40


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_texts_use_the_value_and_labels_that_the_alert_has(rule: dict[str, Any]) -> None:
    labels = {"model_name", "engine", *TARGET_LABELS, "reason", "tenant", "class"}
    for text in rule["annotations"].values():
        for template in _TEMPLATE.findall(text):
            is_label = template.strip().startswith("$labels.") and template.strip().removeprefix("$labels.") in labels
            assert is_label or _VALUE.fullmatch(template), template


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_settings_and_reasons_in_a_text_exist(rule: dict[str, Any]) -> None:
    settings = {*EngineConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__}
    values = {value for family in FAMILIES.values() for child in family.children for value in child}
    words = {word for text in rule["annotations"].values() for word in _IDENTIFIER.findall(_TEMPLATE.sub("", text))}
    assert words - settings - values == set()


def test_alerts_have_the_targets_of_the_indicators() -> None:
    targets = Targets()
    assert f"< {targets.device_busy:.2f}" in alert("PagedCoreDeviceIdles")["expr"]
    assert f"< {targets.hit_rate:.2f} *" in alert("PagedCoreHitRateBelowIdeal")["expr"]
    assert alert("PagedCoreFirstTokenLate")["expr"].endswith(f"> {targets.ttft_p99_s:g}")
    assert alert("PagedCoreRequestsBlocked")["expr"].endswith(f"> {targets.blocked}")
    assert alert("PagedCoreBatchFull")["expr"] == 'pagedcore_waiting_requests{reason="max_num_seqs"} > 0'


def test_the_command_line_asks_for_the_same_targets() -> None:
    flags = {
        "device_busy": "device_busy",
        "running_share": "running_share",
        "hit_rate": "hit_rate",
        "ttft_p99": "ttft_p99_s",
        "blocked": "blocked",
    }
    given = inspect.signature(cli.status).parameters
    assert {target: given[flag].default for flag, target in flags.items()} == {
        target: getattr(Targets(), target) for target in flags.values()
    }


@pytest.mark.parametrize("name", [rule["alert"] for rule in ALERTS])
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(name: str) -> None:
    cases = [case for case in read_yaml(OBSERVABILITY / "alerts_test.yml")["tests"] if case["name"].split()[0] == name]
    firing = [test for case in cases for test in case.get("promql_expr_test", ())]
    silent = [test for case in cases for test in case.get("alert_rule_test", ())]
    assert firing and all(f'alertname="{name}", alertstate="firing"' in test["expr"] and test["exp_samples"] for test in firing)
    assert silent and all(test["alertname"] == name and not test["exp_alerts"] for test in silent)


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")
