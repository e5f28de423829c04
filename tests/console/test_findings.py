"""What stands out: when it is said, when it is not, and the setting that each sentence names."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.console.findings import findings
from pagedcore.console.indicators import Targets
from support.console import make_stats


def stalled(
    *, longest_s: float = 3.0, usual_s: float = 0.1, tokens: int = 1003, prefill_tokens: int = 1000, limit: int = 2048
) -> dict[str, Any]:
    stats = make_stats(max_num_batched_tokens=limit)
    stats["last_minute"] |= {
        "token_gap_p50_s": usual_s, "token_gap_max_s": longest_s,
        "token_gap_max_step_tokens": tokens, "token_gap_max_step_prefill_tokens": prefill_tokens,
    }  # fmt: skip
    return stats


def row(tenant: str, waiting: int, running: int, priority: int = 0) -> dict[str, Any]:
    return {"tenant": tenant, "num_waiting": waiting, "num_running": running, "priority": priority}


def flooded(*rows: dict[str, Any], policy: str = "fcfs") -> list[str]:
    return findings(make_stats(tenants=list(rows), scheduling_policy=policy), Targets())


def test_nothing_stands_out_of_a_server_that_does_well() -> None:
    assert findings(make_stats(), Targets()) == []


def test_a_stall_names_its_prompt_tokens_the_setting_its_value_and_a_better_one() -> None:
    (sentence,) = findings(stalled(), Targets())
    assert sentence == (
        "Answers stood still for up to 3.0 s (a token mostly takes 100 ms) while one step computed 1,000 prompt tokens. "
        "Lower max_num_batched_tokens, now 2,048: 128 would keep such a wait near 471 ms."
    )


@pytest.mark.parametrize(("longest_s", "is_said"), [(0.49, False), (0.5, True)])
def test_a_wait_below_the_target_is_no_stall(longest_s: float, is_said: bool) -> None:
    assert bool(findings(stalled(longest_s=longest_s), Targets())) is is_said
    assert not findings(stalled(longest_s=longest_s), Targets(token_gap_s=0.6))


@pytest.mark.parametrize(("usual_s", "is_said"), [(0.75, True), (0.76, False)])
def test_where_every_token_is_slow_nothing_stands_still(usual_s: float, is_said: bool) -> None:
    assert bool(findings(stalled(usual_s=usual_s), Targets())) is is_said


def test_a_wait_that_no_prompt_explains_is_left_to_the_other_numbers() -> None:
    assert findings(stalled(prefill_tokens=0), Targets()) == []


def test_before_any_answer_has_two_tokens_there_is_no_stall() -> None:
    stats = make_stats()
    stats["last_minute"] |= dict.fromkeys(
        ("token_gap_p50_s", "token_gap_max_s", "token_gap_max_step_tokens", "token_gap_max_step_prefill_tokens")
    )
    assert findings(stats, Targets()) == []


def test_no_number_is_proposed_that_is_not_smaller() -> None:
    (sentence,) = findings(stalled(limit=64, tokens=64, prefill_tokens=60, longest_s=0.9), Targets(token_gap_s=0.89))
    assert sentence.endswith("Lower max_num_batched_tokens, now 64: 32 would keep such a wait near 527 ms.")
    (sentence,) = findings(stalled(limit=32, tokens=32, prefill_tokens=30, longest_s=0.9), Targets())
    assert sentence.endswith("Lower max_num_batched_tokens, now 32.")


def test_no_wait_below_the_usual_one_is_promised() -> None:
    """Each step has costs of its own, however few prompt tokens are in it."""
    (sentence,) = findings(stalled(longest_s=11.2, usual_s=0.6), Targets())
    assert sentence.endswith("32 would keep such a wait near 939 ms.")


def test_a_flood_is_named_while_others_wait() -> None:
    (sentence,) = flooded(row("reports", 20, 4), row("shop", 1, 0))
    assert sentence.startswith("Tenant reports has 24 of 25 open requests, and others wait behind them. Set scheduling_policy=priority")
    assert flooded(row("reports", 20, 4), row("shop", 0, 1)) == []
    assert flooded(row("reports", 20, 4)) == []


def test_a_flood_without_a_tenant_is_one_too() -> None:
    (sentence,) = flooded(row("", 20, 4), row("shop", 1, 0))
    assert sentence.startswith("Callers without a tenant have 24 of 25 open requests")


@pytest.mark.parametrize(("waiting", "is_said"), [(2, False), (3, True)])
def test_up_to_two_thirds_is_no_flood(waiting: int, is_said: bool) -> None:
    assert bool(flooded(row("reports", waiting, 0), row("shop", 1, 0))) is is_said


@pytest.mark.parametrize(("policy", "priority", "is_said"), [("priority", 1, False), ("priority", 0, True), ("fcfs", 1, True)])
def test_a_flood_that_goes_last_is_cured(policy: str, priority: int, is_said: bool) -> None:
    assert bool(flooded(row("reports", 20, 4, priority), row("shop", 1, 0), policy=policy)) is is_said
