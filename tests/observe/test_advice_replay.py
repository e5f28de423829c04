"""The promise of the curve: the same traffic, served again with the advised pool and block size, hits as often as predicted."""

from __future__ import annotations

import functools

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.advice.advice import Advice
from pagedcore.advice.advisor import Advisor
from pagedcore.advice.reuse_sketch import CurvePoint
from pagedcore.core.events import BlockEvicted, Preempted, StepEvents
from pagedcore.observe.recorder import Recorder, RecorderInfo
from support.traffic import TRAFFIC, make_replay_limits, replay

ONE_POINT = 0.01
ROUGH = 0.05
POOL_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
BLOCK_SIZES = (8, 16, 32, 64)
QUICK_TRAFFIC = ("chats", "looping scan")
"""Chains that grow, and a working set with an edge."""


@functools.cache
def advice_after(traffic: str, block_size: int, num_blocks: int) -> Advice:
    recorder = Recorder(RecorderInfo(model_name="m", block_size=block_size, num_blocks=num_blocks), registry=CollectorRegistry())
    advisor = Advisor(recorder, make_replay_limits(block_size, num_blocks), clock=lambda: 1e6)
    replay(TRAFFIC[traffic](7), block_size=block_size, num_blocks=num_blocks, record=recorder.record)
    recorder.close()
    return advisor.advice()


@functools.cache
def real_rate(traffic: str, block_size: int, num_blocks: int) -> float:
    return replay(TRAFFIC[traffic](7), block_size=block_size, num_blocks=num_blocks)


def errors(traffic: str, points: list[CurvePoint]) -> dict[tuple[float, int], float]:
    return {(p.pool_factor, p.block_size): p.hit_rate - real_rate(traffic, p.block_size, p.num_blocks) for p in points}


@pytest.mark.parametrize(
    ("traffic", "num_blocks"),
    [pytest.param(name, 1024 if name == "bursts" else 640, marks=[] if name in QUICK_TRAFFIC else pytest.mark.slow) for name in TRAFFIC],
)
def test_each_predicted_rate_is_within_one_point_of_a_run_at_that_setting(traffic: str, num_blocks: int) -> None:
    points = [point for point in advice_after(traffic, 16, num_blocks).curve if point.pool_factor in POOL_FACTORS]
    assert {(point.pool_factor, point.block_size) for point in points} == {(f, b) for f in POOL_FACTORS for b in BLOCK_SIZES}
    found = errors(traffic, points)
    assert {setting: error for setting, error in found.items() if abs(error) > ONE_POINT} == {}
    assert max(point.hit_rate for point in points) > 0.3 or traffic == "random prompts"


@pytest.mark.parametrize(
    ("traffic", "block_size", "num_blocks"),
    [("chats", 32, 192), pytest.param("shared prompt and documents", 8, 640, marks=pytest.mark.slow)],
)
def test_from_whichever_block_size_it_was_observed(traffic: str, block_size: int, num_blocks: int) -> None:
    """Small pools that could not hold what ran together are left out, and what is left holds."""
    points = [point for point in advice_after(traffic, block_size, num_blocks).curve if point.pool_factor in POOL_FACTORS]
    assert len({point.block_size for point in points}) == len(BLOCK_SIZES)
    assert len(points) >= 16
    assert {setting: error for setting, error in errors(traffic, points).items() if abs(error) > ONE_POINT} == {}


@pytest.mark.parametrize(
    ("traffic", "seed", "num_blocks", "setting"), [("bursts", 19, 1024, (0.5, 64)), ("looping scan", 21, 640, (0.5, 32))]
)
def test_at_the_edge_of_a_working_set_no_block_is_missed(traffic: str, seed: int, num_blocks: int, setting: tuple[float, int]) -> None:
    """A few blocks decide there about whole documents: each must be known to have been evicted just when it was."""
    visits = TRAFFIC[traffic](seed)
    recorder = Recorder(RecorderInfo(model_name="m", block_size=16, num_blocks=num_blocks), registry=CollectorRegistry())
    advisor = Advisor(recorder, make_replay_limits(16, num_blocks), clock=lambda: 1e6)
    replay(visits, block_size=16, num_blocks=num_blocks, record=recorder.record)
    recorder.close()
    (point,) = (one for one in advisor.advice().curve if (one.pool_factor, one.block_size) == setting)
    assert point.hit_rate == pytest.approx(replay(visits, block_size=point.block_size, num_blocks=point.num_blocks), abs=0.001)


@pytest.mark.parametrize("traffic", ["chats", "tenants with salts"])
def test_a_cache_that_was_reset_meanwhile_is_predicted_as_well(traffic: str) -> None:
    """A larger one would have been reset, too."""
    visits = TRAFFIC[traffic](7)
    resets = [visits[-1].turn * part // 4 for part in (1, 2, 3)]
    recorder = Recorder(RecorderInfo(model_name="m", block_size=16, num_blocks=640), registry=CollectorRegistry())
    advisor = Advisor(recorder, make_replay_limits(16, 640), clock=lambda: 1e6)
    replay(visits, block_size=16, num_blocks=640, record=recorder.record, resets=resets)
    recorder.close()
    points = [point for point in advisor.advice().curve if point.pool_factor in POOL_FACTORS and point.block_size in (16, 64)]
    assert len(points) == 10
    found = {
        (p.pool_factor, p.block_size): p.hit_rate - replay(visits, block_size=p.block_size, num_blocks=p.num_blocks, resets=resets)
        for p in points
    }
    assert {setting: error for setting, error in found.items() if abs(error) > ONE_POINT} == {}


def test_a_pool_that_could_not_hold_what_ran_together_is_not_predicted() -> None:
    smallest = min(advice_after("shared prompt and documents", 16, 160).curve, key=lambda point: point.num_blocks * point.block_size)
    assert smallest.num_blocks * smallest.block_size >= 1024
    steps = list[StepEvents]()
    replay(TRAFFIC["shared prompt and documents"](7), block_size=16, num_blocks=40, record=steps.append)
    assert any(isinstance(event, Preempted) for step in steps for event in step.events)


@pytest.mark.parametrize("traffic", ["shared prompt and documents", "tenants with salts", "bursts"])
def test_from_a_pool_in_which_requests_take_blocks_from_each_other_the_rates_are_rough_and_called_so(traffic: str) -> None:
    """What waited there would have run in a larger pool, and taken its room."""
    advice = advice_after(traffic, 16, 48)
    assert advice.sentences[0].startswith("Requests took blocks from each other")
    points = [point for point in advice.curve if point.pool_factor in POOL_FACTORS]
    assert len(points) >= 8
    assert max(abs(error) for error in errors(traffic, points).values()) <= ROUGH
    assert not any("took blocks" in sentence for sentence in advice_after(traffic, 16, 1024 if traffic == "bursts" else 640).sentences)


def test_the_traffic_takes_the_paths_that_matter() -> None:
    """Blocks are evicted, answers are read by the next turn, and requests run together."""
    steps = list[StepEvents]()
    replay(TRAFFIC["chats"](7), block_size=16, num_blocks=192, record=steps.append)
    assert sum(isinstance(event, BlockEvicted) for step in steps for event in step.events) > 500
    assert max(step.num_running for step in steps) >= 4
    visits = TRAFFIC["chats"](7)
    assert any(later.request.prompt_token_ids[: len(v.request.prompt_token_ids + v.answer)] == v.request.prompt_token_ids + v.answer
               for v in visits[:20] for later in visits)  # fmt: skip


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    advice = advice_after("tenants with salts", 16, 640)
    assert advice.hit_rate == real_rate("tenants with salts", 16, 640)
    assert advice.ideal_hit_rate is not None
    assert advice.ideal_hit_rate >= advice.hit_rate
    assert advice.num_lookups == len(TRAFFIC["tenants with salts"](7))
    now = next(point for point in advice.curve if (point.pool_factor, point.block_size) == (1.0, 16))
    assert now.num_blocks == 640
