"""Advice for an engine with a host tier: pool and host memory are one LRU stack, and the curve is about both together."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.advice.advice import Advice
from pagedcore.advice.advisor import Advisor
from pagedcore.advice.reuse_sketch import CurvePoint
from pagedcore.advice.sentences import Findings, write_sentences
from pagedcore.observe.recorder import Recorder, RecorderInfo
from support.traffic import TRAFFIC, make_replay_limits, replay

ONE_POINT = 0.01


def serve(traffic: str, num_blocks: int, num_host_blocks: int) -> tuple[float, Advice]:
    """The hit rate of the traffic with such a pool and tier, and the advice after it."""
    recorder = Recorder(RecorderInfo(model_name="m", block_size=16, num_blocks=num_blocks), registry=CollectorRegistry())
    advisor = Advisor(recorder, make_replay_limits(16, num_blocks, num_host_blocks), clock=lambda: 1e6)
    rate = replay(TRAFFIC[traffic](7), block_size=16, num_blocks=num_blocks, num_host_blocks=num_host_blocks, record=recorder.record)
    recorder.close()
    return rate, advisor.advice()


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(160, 160), pytest.param(160, 480, marks=pytest.mark.slow)])
@pytest.mark.parametrize("traffic", ["shared prompt and documents", "chats", "tenants with salts"])
def test_the_predicted_rates_are_those_of_both_together(traffic: str, num_blocks: int, num_host_blocks: int) -> None:
    measured, advice = serve(traffic, num_blocks, num_host_blocks)
    points = {point.pool_factor: point for point in advice.curve if point.block_size == 16}
    twice, _ = serve(traffic, 2 * num_blocks, 2 * num_host_blocks)
    assert points[1.0].num_blocks == num_blocks + num_host_blocks
    assert points[1.0].hit_rate == pytest.approx(measured, abs=ONE_POINT)
    assert points[2.0].hit_rate == pytest.approx(twice, abs=ONE_POINT)
    assert measured > serve(traffic, num_blocks, 0)[0] + ONE_POINT


def test_what_runs_has_to_fit_the_pools_share() -> None:
    """A fourth of both would have left 40 blocks of the device, in which these prompts could not have run together."""
    _, advice = serve("chats", 160, 480)
    _, one_pool = serve("chats", 640, 0)
    assert min(point.pool_factor for point in advice.curve if point.block_size == 16) == 0.5
    assert min(point.pool_factor for point in one_pool.curve if point.block_size == 16) == 0.25


def test_the_sentence_names_both_settings() -> None:
    small = CurvePoint(pool_factor=1.0, num_blocks=320, block_size=16, hit_rate=0.4)
    large = dataclasses.replace(small, pool_factor=2.0, num_blocks=640, hit_rate=0.7)
    findings = Findings(
        curve=(small, large),
        block_size=16,
        hit_rate=0.4,
        ideal_hit_rate=0.8,
        num_lookups=100,
        divergences=(),
        is_caching_on=True,
        shared_tail_tokens=None,
        has_host_tier=True,
    )
    assert write_sentences(findings)[0] == (
        "Pool and swap_space together twice as large (640 blocks) would raise the hit rate from 40 % to 70 %."
    )


def test_an_engine_with_a_tier_speaks_of_both() -> None:
    _, advice = serve("chats", 80, 80)
    assert advice.sentences[0].startswith("Pool and swap_space together twice as large (320 blocks)")
