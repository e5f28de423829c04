"""KV blocks in host memory: copies bit for bit, outputs that do not change, and the choice between copying and computing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from pagedcore.config import EngineConfig, EnginePlan, HostTierPlan
from pagedcore.errors import ConfigError
from pagedcore.runtime.build import build_runner
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.swap import costs, host_blocks, tier
from pagedcore.swap.costs import SwapCosts, measure_costs
from pagedcore.swap.host_blocks import HostBlocks, num_staged_blocks
from support import swap_checks
from support.runner_driver import make_runner
from support.tiny_model import TinyModel

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
COPYING, COMPUTING = SwapCosts(copy_s=0.001, compute_s=0.002), SwapCosts(copy_s=0.002, compute_s=0.001)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 5])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype, head_dim: int) -> None:
    swap_checks.check_blocks_come_back_bit_for_bit("cpu", dtype, head_dim=head_dim)


def test_they_do_in_as_many_parts_as_the_staging_buffer_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = swap_checks.make_cache(torch.float16, "cpu")[:, 0].nbytes
    for num_staged in (1, 2, 5):
        monkeypatch.setattr(host_blocks, "STAGING_BYTES", num_staged * block_bytes)
        assert len(HostBlocks(swap_checks.make_cache(torch.float16, "cpu"), 30)._staging) == num_staged
        swap_checks.check_blocks_come_back_bit_for_bit("cpu", torch.float16)


def test_the_staging_buffer_holds_one_block_at_least_and_no_more_than_there_are_host_blocks() -> None:
    assert num_staged_blocks(host_blocks.STAGING_BYTES + 1, 100) == 1
    assert num_staged_blocks(host_blocks.STAGING_BYTES // 8, 100) == 8
    assert num_staged_blocks(1, 3) == 3


@pytest.mark.parametrize(
    ("ids", "runs"),
    [([4], [(0, range(4, 5))]), ([1, 2, 3], [(0, range(1, 4))]), ([0, 2, 3, 7], [(0, range(1)), (1, range(2, 4)), (3, range(7, 8))])],
)
def test_neighbouring_host_blocks_travel_together(ids: list[int], runs: list[tuple[int, range]]) -> None:
    assert list(host_blocks._runs([(9, host_block) for host_block in ids])) == runs


def test_a_plan_copies_out_then_in_then_writes() -> None:
    swap_checks.check_a_plan_copies_out_then_in_then_writes("cpu")


@pytest.mark.parametrize("num_in_flight_steps", [1, 2])
def test_outputs_with_host_memory_equal_those_without(num_in_flight_steps: int) -> None:
    swap_checks.check_outputs_with_host_memory_equal_those_without("cpu", num_in_flight_steps)


def test_a_runner_without_host_blocks_refuses_copies() -> None:
    runner = make_runner(TinyModel())
    plan = costs.replace(costs._NOTHING, copies_out=[(0, 0)])
    with pytest.raises(AssertionError, match="no host memory"):
        runner.submit(plan).result()


def test_costs_are_measured_in_seconds_a_block_and_leave_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(TinyModel(), num_blocks=10)
    ticks = iter([0.0, 9.0, 10.0, 10.5, 20.0, 21.0, 0.0, 9.0, 10.0, 14.0, 20.0, 25.0])  # starts and ends of 2 x 3 runs
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(ticks))
    measured = measure_costs(runner, num_blocks=10, block_size=8, num_tokens=40)
    assert measured == SwapCosts(copy_s=0.5 / 10, compute_s=4.0 / 5)
    assert runner._buffers._rows == {}
    runner.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4


def build(model_dir: Path, **changes: object) -> tuple[ModelRunner, EnginePlan]:
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "dtype": "float32", "num_kv_blocks": 8, **changes}
    return build_runner(EngineConfig.from_mapping(options), model_dir)


def gib(num_blocks: float) -> float:
    return num_blocks * BLOCK_BYTES / 2**30


@pytest.fixture
def given_costs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SwapCosts:
    monkeypatch.setattr(tier, "measure_costs", lambda runner, **_: request.param)
    return request.param


@pytest.mark.parametrize("given_costs", [COPYING], indirect=True)
def test_where_copying_is_quicker_the_plan_has_its_blocks_and_says_why(
    model_dir: Path, given_costs: SwapCosts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner, plan = build(model_dir, swap_space=gib(20.5))
    assert plan.host_tier == HostTierPlan(num_blocks=20, block_bytes=BLOCK_BYTES, copy_block_s=0.001, compute_block_s=0.002)
    assert (plan.num_host_blocks, plan.host_tier.num_bytes) == (20, 20 * BLOCK_BYTES)
    assert runner._host is not None
    assert runner._host._host.nbytes == 20 * BLOCK_BYTES
    assert "20 blocks in host memory (0.000 GiB); copying a block there and back takes 1.000 ms, computing it 2.000 ms." in caplog.text
    runner.close()


@pytest.mark.parametrize("given_costs", [COMPUTING], indirect=True)
def test_where_computing_is_quicker_no_memory_is_taken_and_a_warning_says_so(
    model_dir: Path, given_costs: SwapCosts, caplog: pytest.LogCaptureFixture
) -> None:
    runner, plan = build(model_dir, swap_space=gib(20))
    assert plan.host_tier == HostTierPlan(num_blocks=0, block_bytes=BLOCK_BYTES, copy_block_s=0.002, compute_block_s=0.001)
    assert (plan.num_host_blocks, runner._host) == (0, None)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "No host memory is used: copying a block there and back takes 2.000 ms, computing it 1.000 ms" in record.message
    runner.close()


def test_by_default_there_is_no_tier_and_nothing_is_measured(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "measure_costs", None)
    runner, plan = build(model_dir)
    assert (plan.host_tier, plan.num_host_blocks, runner._host) == (None, 0, None)
    assert plan.memory.activations_bytes == 0


def test_both_costs_are_measured_on_this_machine(model_dir: Path) -> None:
    runner, plan = build(model_dir, swap_space=gib(20))
    assert plan.host_tier is not None
    assert (plan.host_tier.num_blocks > 0) == (plan.host_tier.copy_block_s < plan.host_tier.compute_block_s)
    assert min(plan.host_tier.copy_block_s, plan.host_tier.compute_block_s) > 0
    runner.close()


@pytest.mark.parametrize("given_costs", [COPYING], indirect=True)
def test_the_staging_buffer_is_in_the_memory_plan(model_dir: Path, given_costs: SwapCosts) -> None:
    runner, plan = build(model_dir, swap_space=gib(5))
    assert runner._host is not None
    assert plan.memory.activations_bytes == runner._host._staging.nbytes == 5 * BLOCK_BYTES


def test_more_than_the_free_memory_is_refused_by_its_size(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"swap_space is 1e\+06 GiB and this machine has \d+\.\d{3} GiB of host memory free"):
        build(model_dir, swap_space=1e6)


def test_less_than_a_block_is_refused_by_the_size_of_a_block(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"one KV block takes 0\.000004 GiB"):
        build(model_dir, swap_space=gib(0.9))


def test_memory_that_cannot_be_had_is_a_config_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ModelRunner, num_blocks: int) -> None:
        raise RuntimeError("out of lockable memory.")

    monkeypatch.setattr(ModelRunner, "keep_host_blocks", refuse)
    with pytest.raises(ConfigError, match=r"cannot be had: out of lockable memory\. Lower it"):
        build(model_dir, swap_space=gib(20))


@pytest.mark.parametrize("given_costs", [COPYING], indirect=True)
def test_close_gives_the_host_memory_back(model_dir: Path, given_costs: SwapCosts) -> None:
    runner, _ = build(model_dir, swap_space=gib(20))
    host = runner._host
    assert host is not None
    runner.close()
    assert runner._host is None
    assert not any(isinstance(value, torch.Tensor) for value in vars(host).values())
