"""Host memory for KV blocks on a CUDA device: copies through locked memory, in the order of the stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedcore.core.step import StepPlan
from pagedcore.swap import host_blocks, tier
from pagedcore.swap.costs import SwapCosts
from pagedcore.swap.host_blocks import HostBlocks
from support import runner_driver, swap_checks
from support.runner_driver import make_runner
from support.tiny_model import TinyModel

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn]
COPYING = SwapCosts(copy_s=1e-6, compute_s=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_staged", [1, 5, 100])
def test_blocks_come_back_bit_for_bit(dtype: torch.dtype, num_staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = swap_checks.make_cache(dtype, "cpu")[:, 0].nbytes
    monkeypatch.setattr(host_blocks, "STAGING_BYTES", num_staged * block_bytes)
    swap_checks.check_blocks_come_back_bit_for_bit("cuda", dtype)


@pytest.fixture(params=["torch", "triton", "triton and graphs"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_driver, "ATTENTION_BACKEND", request.param.split()[0])
    monkeypatch.setattr(runner_driver, "CAPTURES_GRAPHS", "graphs" in request.param)


@pytest.mark.usefixtures("_backend")
def test_a_plan_copies_out_then_in_then_writes() -> None:
    swap_checks.check_a_plan_copies_out_then_in_then_writes("cuda")


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("num_in_flight_steps", [1, 2])
def test_outputs_with_host_memory_equal_those_without(num_in_flight_steps: int) -> None:
    swap_checks.check_outputs_with_host_memory_equal_those_without("cuda", num_in_flight_steps)


def test_host_memory_is_locked_and_given_back() -> None:
    host = HostBlocks(swap_checks.make_cache(torch.bfloat16, "cuda"), 30)
    blocks = host._host
    assert blocks.is_pinned()
    host.copy_out([(0, 0)])
    host.close()
    assert not blocks.is_pinned()


def test_no_copy_makes_the_host_wait() -> None:
    """A step with copies is submitted while the device is busy with the one before."""
    runner = make_runner(TinyModel(device="cuda"), num_blocks=64)
    runner.keep_host_blocks(64)
    copies = [(block_id, block_id) for block_id in range(0, 64, 2)]
    plan = StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[], copies_out=copies, copies_in=copies)
    runner.submit(plan).result()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    sleeping = torch.cuda.Event()
    sleeping.record()
    pending = [runner.submit(plan) for _ in range(4)]
    assert not sleeping.query()
    for step in pending:
        step.result()
    runner.close()


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_an_engine_serves_prefixes_from_host_memory(kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcore import LLM, SamplingParams

    monkeypatch.setattr(tier, "measure_costs", lambda runner, **_: COPYING)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[index + 3] * 200 for index in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    with LLM(str(tmp_path), num_kv_blocks=64, swap_space=0.05, kv_cache_dtype=kv_cache_dtype, **options) as llm:
        first = llm.generate(prompts, params)
        second = llm.generate(prompts, params)
        assert sum(output.cache.host_tokens for output in second if output.cache is not None) >= 6 * 192
        assert all(output.status == "completed" for output in (*first, *second))
        stats = llm.stats()
        assert stats.swapped_blocks["in"] * 16 == stats.prefix_cache_hit_tokens_by_source["host"]
        llm.check()


def test_the_measured_choice_is_in_the_plan(tmp_path: Path) -> None:
    from pagedcore import LLM

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "num_kv_blocks": 1000}
    with LLM(str(tmp_path), swap_space=0.5, **options) as llm:
        plan = llm.engine.plan.host_tier
        assert plan is not None
        print(tier.describe(plan))
        assert (plan.num_blocks > 0) == (plan.copy_block_s < plan.compute_block_s)
