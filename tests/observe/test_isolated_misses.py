"""Blocks that another tenant or salt holds: named to operators, by the real scheduler's lookups. Block size 4."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.twin_blocks import TwinBlocks
from support.core_builders import BLOCK_SIZE, Driver
from support.observed import make_add, make_lookup

PROMPT = [*range(13)]
"""Three eligible blocks."""


class Served:
    """A scheduler and its recorder; requests run one after another."""

    def __init__(self, num_blocks: int = 16, **limits: int) -> None:
        self.driver = Driver.make(num_blocks=num_blocks, **limits)
        info = RecorderInfo(model_name="m", block_size=BLOCK_SIZE, num_blocks=num_blocks)
        self.recorder = Recorder(info, registry=CollectorRegistry(), clock=lambda: self.driver.now_s)
        self.num_requests = self.num_steps = 0

    def reasons(self, prompt: Sequence[int], *, tenant: str | None = None, cache_salt: str | None = None) -> tuple[str, ...]:
        """Serve one request; returns why each block of it missed."""
        name = self._add(prompt, tenant=tenant, cache_salt=cache_salt)
        self.driver.run()
        self._record()
        explained = self.recorder.explained(name)
        assert explained is not None
        return explained[1]

    def leave_after_one_step(self, prompt: Sequence[int], *, tenant: str | None = None) -> None:
        """One request whose caller leaves while it is being computed."""
        name = self._add(prompt, tenant=tenant)
        self.driver.turn()
        self.driver.scheduler.abort(name, self.driver.now_s)
        self.driver.take()
        self._record()

    def _add(self, prompt: Sequence[int], **fields: str | None) -> str:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.driver.add(name, prompt, max_tokens=1, **fields)
        return name

    def _record(self) -> None:
        for step in self.driver.steps[self.num_steps :]:
            self.recorder.record(step)
        self.num_steps = len(self.driver.steps)


@pytest.mark.parametrize(
    ("first", "second"), [({"tenant": "a"}, {"tenant": "b"}), ({"tenant": "a"}, {"tenant": "a", "cache_salt": "s"}), ({"tenant": "a"}, {})]
)
def test_what_another_tenant_or_salt_holds_is_isolated_and_not_cold(first: dict[str, str], second: dict[str, str]) -> None:
    served = Served()
    assert served.reasons(PROMPT, **first) == ("cold",) * 3
    assert served.reasons(PROMPT, **second) == ("isolated",) * 3
    assert served.reasons(PROMPT, **second) == ()
    assert served.recorder.stats().miss_blocks["isolated"] == 3


def test_only_the_blocks_whose_whole_prefix_is_the_same_are_isolated() -> None:
    served = Served()
    served.reasons([*range(9), 1, 2, 3, 4], tenant="a")
    assert served.reasons(PROMPT, tenant="b") == ("isolated", "isolated", "cold")
    assert served.reasons([99, *PROMPT[1:]], tenant="c") == ("cold",) * 3


def test_a_tenants_own_history_goes_before_that_of_others() -> None:
    served = Served(num_blocks=8)
    served.reasons(PROMPT, tenant="a")
    served.reasons([100 + token for token in range(29)], tenant="a")  # eight blocks: all of the first prompt's are evicted
    assert served.reasons(PROMPT, tenant="a") == ("evicted",) * 3


def test_what_the_other_tenant_no_longer_holds_is_cold() -> None:
    served = Served(num_blocks=8)
    served.reasons(PROMPT, tenant="a")
    served.reasons([100 + token for token in range(29)], tenant="c")
    assert served.reasons(PROMPT, tenant="b") == ("cold",) * 3


def test_what_the_other_tenant_computed_again_after_its_eviction_is_isolated() -> None:
    served = Served(num_blocks=8)
    served.reasons(PROMPT, tenant="a")
    served.reasons([100 + token for token in range(29)], tenant="c")
    served.reasons(PROMPT, tenant="a")
    assert served.reasons(PROMPT, tenant="b") == ("isolated",) * 3


def test_a_tenants_own_blocks_that_were_forgotten_at_once_are_cold() -> None:
    served = Served()
    served.reasons(PROMPT, tenant="a")
    assert served.driver.scheduler.reset_prefix_cache(served.driver.now_s)
    assert served.reasons(PROMPT, tenant="a") == ("cold",) * 3


@pytest.mark.parametrize("first", [{"tenant": "a"}, {"cache_salt": "s"}], ids=str)
def test_what_others_held_before_the_cache_was_reset_is_cold(first: dict[str, str]) -> None:
    served = Served()
    served.reasons(PROMPT, **first)
    assert served.driver.scheduler.reset_prefix_cache(served.driver.now_s)
    assert served.reasons(PROMPT, tenant="b") == ("cold",) * 3
    assert served.recorder.stats().pool_evictions == 0
    assert served.reasons(PROMPT, **first) == ("isolated",) * 3, "the next one holds it anew"


def test_what_a_running_request_of_another_tenant_keeps_over_a_reset_stays_isolated() -> None:
    served = Served(num_blocks=32)
    served.reasons([100 + token for token in range(13)], tenant="a")
    served.driver.add("running", PROMPT, max_tokens=20, tenant="a")
    served.driver.turn()
    assert not served.driver.scheduler.reset_prefix_cache(served.driver.now_s)
    served.driver.add("b0", PROMPT, max_tokens=1, tenant="b")
    served.driver.add("b1", [100 + token for token in range(13)], max_tokens=1, tenant="b")
    served.driver.run()
    served._record()
    explained = {name: served.recorder.explained(name) for name in ("b0", "b1")}
    assert [found[1] for found in explained.values() if found] == [("isolated",) * 3, ("cold",) * 3]


def test_what_a_failed_step_made_doubtful_is_isolated_no_more() -> None:
    served = Served()
    served.reasons(PROMPT, tenant="a")
    served.driver.runner.failing_steps.add(served.driver.scheduler._next_step_id)
    assert served.reasons([7, 7, 7], tenant="c") == ()
    assert served.reasons(PROMPT, tenant="b") == ("cold",) * 3


@pytest.mark.parametrize(("own", "others", "diverged_at"), [([0, 1, 9, 9, 9], "isolated", 2), ([*range(6), 9, 9, 9], "isolated", 6)])
def test_isolated_goes_before_short_and_diverged_and_hides_no_divergence(own: list[int], others: str, diverged_at: int) -> None:
    """The tenant is told of that divergence with and without the others: that it was missing would tell what they sent."""
    served = Served()
    served.reasons(own, tenant="b")
    served.reasons(PROMPT, tenant="a")
    assert set(served.reasons(PROMPT, tenant="b")) == {others}
    report = served.recorder.cache_report("r2")
    assert report is not None
    assert report.diverged_at_token == diverged_at


def test_what_the_other_tenant_left_before_it_was_computed_is_cold() -> None:
    served = Served(max_num_batched_tokens=BLOCK_SIZE)
    served.leave_after_one_step(PROMPT, tenant="a")
    assert served.reasons(PROMPT, tenant="b") == ("isolated", "cold", "cold")


def test_an_unbounded_cache_does_not_hold_what_was_left_before_it_was_computed() -> None:
    served = Served(max_num_batched_tokens=BLOCK_SIZE)
    served.leave_after_one_step(PROMPT)
    assert served.reasons(PROMPT) == ("cold",) * 2
    stats = served.recorder.stats()
    assert (stats.prefix_cache_hit_tokens, stats.ideal_hit_tokens, stats.abandoned_prompt_tokens) == (BLOCK_SIZE, BLOCK_SIZE, 9)


def test_without_tenants_and_salts_nothing_is_remembered_and_memory_is_bounded() -> None:
    twins = TwinBlocks(num_blocks=10)
    for number in range(50):
        twins.note(make_add(f"r{number}"), make_lookup("a", "b"), 0.0, lambda _: None)
    assert not twins._young
    for number in range(50):
        request = make_add(f"r{number}", tenant=f"t{number}")
        request.prompt_token_ids[0] = number
        assert twins.note(request, make_lookup("a", "b"), 0.0, lambda _: None) == frozenset()
        assert len(twins._young) + len(twins._old) <= 20
    assert twins._old
