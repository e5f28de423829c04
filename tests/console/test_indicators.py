"""Five numbers, their verdicts at and beside the targets, and the step that each asks for."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.console.indicators import Indicator, Targets, indicators, parse_targets
from pagedcore.errors import ConfigError
from support.console import make_stats


def judge(name: str, targets: Targets | None = None, **facts: Any) -> Indicator:
    found = {one.name: one for one in indicators(make_stats(**facts), targets or Targets())}
    return found[name]


def test_a_server_that_does_well_needs_nothing() -> None:
    found = indicators(make_stats(), Targets())
    assert [(one.name, one.shown, one.verdict, one.next_step) for one in found] == [
        ("device busy", "80 %", "good", ""),
        ("running requests", "4", "good", ""),
        ("cache hit rate", "90 %", "good", ""),
        ("p99 to first token", "400 ms", "good", ""),
        ("blocked", "0", "good", ""),
    ]


@pytest.mark.parametrize(("busy", "verdict"), [(0.0, "idle"), (0.69, "attention"), (0.70, "good"), (1.0, "good")])
def test_device_busy_is_judged_while_there_is_traffic(busy: float, verdict: str) -> None:
    assert judge("device busy", busy=busy).verdict == verdict


def test_a_server_that_has_nothing_to_do_now_is_idle_whatever_the_minute_was() -> None:
    assert judge("device busy", busy=0.2, num_running=0).verdict == "idle"
    assert judge("device busy", busy=0.2, num_running=0, num_waiting=1).verdict == "attention"


def test_an_idling_device_with_a_queue_is_another_fault_than_one_without_work() -> None:
    assert "replicas" in judge("device busy", busy=0.2).next_step
    assert "Requests wait" in judge("device busy", busy=0.2, num_waiting=3).next_step


def test_the_batch_is_full_only_while_somebody_waits() -> None:
    assert judge("running requests", num_running=8).verdict == "good"
    full = judge("running requests", num_running=8, num_waiting=1)
    assert (full.verdict, "max_num_seqs" in full.next_step) == ("attention", True)
    assert judge("running requests", num_running=0).verdict == "idle"


@pytest.mark.parametrize(
    ("value", "ideal", "verdict"),
    [
        (0.85, 0.99, "good"),
        (0.84, 0.99, "attention"),
        (0.60, 0.62, "good"),
        (0.60, 0.95, "attention"),
        (0.30, 0.30, "good"),
        (0.29, 0.29, "attention"),
    ],
)
def test_the_hit_rate_is_read_beside_the_ideal(value: float, ideal: float, verdict: str) -> None:
    found = judge("cache hit rate", hit_rate=value, ideal=ideal)
    assert (found.verdict, f"{ideal * 100:.0f} %" in found.note) == (verdict, True)


def test_a_low_rate_is_the_layouts_fault_where_no_cache_would_do_better() -> None:
    assert "put what all share" in judge("cache hit rate", hit_rate=0.0, ideal=0.0).next_step
    assert "larger pool" in judge("cache hit rate", hit_rate=0.0, ideal=0.9).next_step
    assert judge("cache hit rate", Targets(hit_rate=0.0), hit_rate=0.0, ideal=0.0).verdict == "good"


@pytest.mark.parametrize(("num_prompts", "verdict"), [(15, "idle"), (16, "attention")])
def test_of_a_few_prompts_it_is_not_said_that_they_share_little(num_prompts: int, verdict: str) -> None:
    stats = make_stats(hit_rate=0.0, ideal=0.0)
    stats["last_minute"]["num_first_tokens"] = num_prompts
    assert {one.name: one.verdict for one in indicators(stats, Targets())}["cache hit rate"] == verdict


@pytest.mark.parametrize(("ttft_s", "verdict"), [(0.999, "good"), (1.0, "attention"), (None, "idle")])
def test_the_time_to_first_token_must_stay_below_its_target(ttft_s: float | None, verdict: str) -> None:
    assert judge("p99 to first token", ttft_s=ttft_s).verdict == verdict


@pytest.mark.parametrize("reason", ["blocks", "max_num_seqs", "token_budget", "tenant_quota", "priority", "batch_window"])
def test_each_reason_to_wait_has_its_own_remedy(reason: str) -> None:
    found = judge("blocked", num_waiting=2, num_waiting_by_reason={reason: 2, "blocks": 0} if reason != "blocks" else {reason: 2})
    assert (found.verdict, found.note) == ("attention", f"2 for {reason}")
    assert found.next_step != judge("blocked", num_waiting=2).next_step


def test_nothing_looked_up_is_nothing_to_judge() -> None:
    found = judge("cache hit rate", hit_rate=None, ideal=None)
    assert (found.value, found.shown, found.verdict) == (None, "-", "idle")


def test_prompts_shorter_than_a_block_are_nothing_to_judge_either() -> None:
    stats = make_stats(hit_rate=0.0, ideal=0.0)
    stats["last_minute"]["hit_rate"]["page"] = None
    (found,) = [one for one in indicators(stats, Targets()) if one.name == "cache hit rate"]
    assert (found.verdict, found.note) == ("idle", "no prompt of the last minute was longer than a block")


def test_without_a_cache_the_prompts_are_not_blamed() -> None:
    found = judge("cache hit rate", hit_rate=0.0, ideal=0.0, enable_prefix_caching=False)
    assert (found.verdict, found.next_step) == ("idle", "")
    assert "enable_prefix_caching" in found.note


@pytest.mark.parametrize(("share", "shown"), [(0.8496, "84.9 %"), (0.846, "84.6 %"), (0.844, "84 %"), (0.85, "85 %"), (0.8549, "85 %")])
def test_a_share_that_misses_its_target_does_not_read_as_if_it_met_it(share: float, shown: str) -> None:
    assert judge("cache hit rate", hit_rate=share, ideal=1.0).shown == shown
    assert judge("device busy", Targets(device_busy=0.85), busy=share).shown == shown


def test_every_target_can_be_set() -> None:
    easy = Targets(device_busy=0.1, running_share=1.0, hit_rate=0.2, ttft_p99_s=60.0, blocked=10)
    facts = {"busy": 0.2, "hit_rate": 0.3, "ideal": 0.9, "ttft_s": 30.0, "num_waiting": 9}
    assert {one.verdict for one in indicators(make_stats(**facts), easy)} == {"good"}
    assert judge("running requests", Targets(running_share=0.5), num_waiting=1).verdict == "attention"


@pytest.mark.parametrize(
    "wrong",
    [{"token_gap_s": -0.1}, {"device_busy": 1.1}, {"hit_rate": -0.1}, {"running_share": float("nan")}, {"ttft_p99_s": -1}, {"blocked": -1}],
)
def test_a_target_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Targets(**wrong)


def test_targets_are_read_off_texts_and_the_others_stay() -> None:
    assert parse_targets(["hit_rate=0.6", "blocked=3", "hit_rate=0.5"]) == Targets(hit_rate=0.5, blocked=3)
    assert parse_targets([]) == Targets()


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("hit_rat=0.6", "The names are: device_busy, running_share, hit_rate"),
        ("hit_rate", "hit_rate is '' and must be a number, such as 0.85"),
        ("blocked=1.5", "blocked is '1.5' and must be a number, such as 0"),
        ("hit_rate=85", "hit_rate is 85.0 and must be between 0 and 1"),
    ],
)
def test_a_text_that_is_no_target_is_refused_with_what_it_should_be(pair: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_targets([pair])
    assert said in str(refused.value)
