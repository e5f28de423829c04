"""A request whose next token needs what the host knows (a grammar) is never planned ahead, and that changes nobody's tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

import support.scenarios
from pagedcore.core.step import PendingStep, StepPlan, StepResult
from pagedcore.messages import AddRequest
from pagedcore.structured_outputs import StructuredOutputsParams
from support.core_builders import Driver, make_request
from support.fake_runner import FakeRunner
from support.scenarios import check_outcome, make_scenario, rare_paths, run_scenario

FORM = StructuredOutputsParams(regex="[a-z]+")
OVERLAP = {"num_in_flight_steps": 2}


@dataclass(slots=True)
class WatchingRunner(FakeRunner):
    """Fails where a plan computes a constrained row one of whose tokens is not known on the host."""

    constrained_rows: set[int] = field(default_factory=set)
    unread: Counter[int] = field(default_factory=Counter)
    """Row -> tokens drawn for it in steps whose result was not read."""
    num_plans_beside_unread: int = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        for row in plan.released_rows:
            self.constrained_rows.discard(row)
            del self.unread[row]
        self.constrained_rows |= {admitted.row for admitted in plan.admitted if admitted.params.structured_outputs is not None}
        ahead = [row for row in plan.rows if row in self.constrained_rows and self.unread[row] > 0]
        assert not ahead, f"rows {ahead} are planned before their last token is known"
        self.num_plans_beside_unread += any(self.unread[row] > 0 for row in self.constrained_rows)
        drawn = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        self.unread.update(drawn)
        return _Watched(self, FakeRunner.submit(self, plan), drawn)


@dataclass(slots=True)
class _Watched:
    runner: WatchingRunner
    pending: PendingStep
    drawn: list[int]

    def result(self) -> StepResult:
        self.runner.unread.subtract([row for row in self.drawn if row in self.runner.unread])
        return self.pending.result()


def constrained(request: AddRequest) -> AddRequest:
    return replace(request, params=request.params.replace(structured_outputs=FORM))


@pytest.mark.parametrize("group", [0, *(pytest.param(group, marks=pytest.mark.slow) for group in (1, 2, 3))])
def test_whatever_the_schedule_a_constrained_request_is_never_planned_ahead(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runners: list[WatchingRunner] = []

    def watching(*arguments: object) -> WatchingRunner:
        runners.append(WatchingRunner(*arguments))  # type: ignore[arg-type]
        return runners[-1]

    monkeypatch.setattr(support.scenarios, "FakeRunner", watching)
    paths: Counter[str] = Counter()
    for seed in range(group * 30, (group + 1) * 30):
        scenario = make_scenario(seed)
        for turn, requests in scenario.arrivals.items():
            is_constrained = [(index + turn) % 2 == 0 for index in range(len(requests))]
            scenario.arrivals[turn] = [constrained(r) if wanted else r for r, wanted in zip(requests, is_constrained, strict=True)]
        driver = run_scenario(scenario)
        check_outcome(scenario, driver)
        paths += rare_paths(scenario, driver)
    assert all(paths[name] for name in ("preemption", "resume", "abort", "stop")), paths
    assert sum(runner.num_plans_beside_unread for runner in runners) > 0, "no plan was made while a constrained row had a token in flight"


def test_beside_a_constrained_request_the_others_go_on_in_every_step() -> None:
    driver = Driver.make(**OVERLAP)
    driver.add("free", [1, 2, 3], max_tokens=6)
    driver.scheduler.add(constrained(make_request("held", [4, 5, 6], max_tokens=3)), 0.0)
    plans = [driver.turn() for _ in range(6)]
    assert [len(plan.rows) for plan in plans if plan is not None] == [2, 1, 2, 1, 2, 1]
    driver.run()
    assert {request_id: len(tokens) for request_id, tokens in driver.tokens.items()} == {"free": 6, "held": 3}


def test_alone_it_is_planned_when_its_token_is_there() -> None:
    driver = Driver.make(**OVERLAP)
    driver.scheduler.add(constrained(make_request("held", [4, 5, 6], max_tokens=3)), 0.0)
    assert [driver.turn() is not None for _ in range(6)] == [True, False, True, False, True, False]
    assert not driver.scheduler.has_work


def test_its_prompt_may_be_computed_ahead_in_chunks() -> None:
    driver = Driver.make(**OVERLAP, max_num_batched_tokens=2)
    driver.scheduler.add(constrained(make_request("held", [1, 2, 3, 4, 5], max_tokens=2)), 0.0)
    plans = [driver.turn() for _ in range(4)]
    assert [plan.num_tokens[0] if plan is not None else None for plan in plans] == [2, 2, 1, None]
