"""The runtime on CUDA: what holds on a CPU holds here, and memory stays within its budget."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pagedcore.config import EngineConfig
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime.attention import PagedAttention
from pagedcore.runtime.build import build_runner
from pagedcore.runtime.probe import profiling_plan
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels import gumbel_noise
from support import runner_checks, runner_driver, sampler_checks
from support.paged_attention_cases import TOLERANCE, make_case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_precision_matmul():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (9, 3, 64), (5, 1, 80), (8, 2, 128)])
@pytest.mark.parametrize("sliding_window", [None, 33])
def test_attention_equals_dense(dtype, block_size, num_heads, num_kv_heads, head_dim, sliding_window) -> None:
    case = make_case(
        query_lens=[1, 5, 129, 1, 1, 3],
        context_lens=[1100, 0, 260, 0, 37, 8],
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    workspace = torch.full((4096, 2 * num_kv_heads, head_dim), float("nan"), dtype=dtype, device="cuda")
    attention = PagedAttention(case.inputs, case.cache, workspace)
    actual = attention.forward(1, case.query, case.key, case.value, scale=0.125, sliding_window=sliding_window)
    torch.testing.assert_close(actual.double(), case.dense(0.125, sliding_window), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.fixture(params=["torch", "triton", "triton and graphs"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_driver, "ATTENTION_BACKEND", request.param.split()[0])
    monkeypatch.setattr(runner_driver, "CAPTURES_GRAPHS", "graphs" in request.param)


@pytest.mark.usefixtures("_backend")
def test_together_equals_alone() -> None:
    runner_checks.check_together_equals_alone("cuda")


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("chunk", [1, 8, 32])
def test_chunked_prefill_equals_whole(chunk: int) -> None:
    runner_checks.check_chunks_equal_whole("cuda", chunk)


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_block_size_is_irrelevant(block_size: int) -> None:
    runner_checks.check_block_size_is_irrelevant("cuda", block_size)


@pytest.mark.usefixtures("_backend")
def test_resume_after_preemption_equals_uninterrupted() -> None:
    runner_checks.check_resume_equals_uninterrupted("cuda")


@pytest.mark.usefixtures("_backend")
def test_submit_ahead_equals_step_by_step() -> None:
    runner_checks.check_submit_ahead_equals_step_by_step("cuda")


@pytest.mark.usefixtures("_backend")
def test_passes_of_one_step_keep_their_logits() -> None:
    runner_checks.check_passes_keep_their_logits("cuda")


@pytest.mark.usefixtures("_backend")
def test_poisoned_memory_never_leaks() -> None:
    runner_checks.check_poisoned_memory_never_leaks("cuda")


@pytest.mark.usefixtures("_backend")
def test_prompt_logprobs_in_chunks_equal_one_token_at_a_time() -> None:
    runner_checks.check_prompt_logprobs("cuda")


def test_sampler_draws_what_the_cpu_draws() -> None:
    sampler_checks.check_same_draws_on("cuda")


def test_noise_is_that_of_the_cpu() -> None:
    arguments = torch.arange(64) * 977, torch.arange(64), torch.arange(40_000)
    cuda = gumbel_noise(*(tensor.cuda() for tensor in arguments))
    torch.testing.assert_close(cuda.cpu(), gumbel_noise(*arguments), atol=1e-5, rtol=1e-5)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def engine_config(**changes: object) -> EngineConfig:
    return EngineConfig.from_mapping({"load_format": "dummy", "device": "cuda", "max_num_seqs": 64, **changes})


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_submit_does_not_wait_for_the_device(model_dir: Path) -> None:
    """No synchronising call is made while steps are submitted."""
    runner, _ = build_runner(engine_config(num_kv_blocks=600), model_dir)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=1, top_k=20, top_p=0.9, repetition_penalty=1.1),
    ]
    rows = [
        AdmittedRow(row=i, request_id=str(i), token_ids=[5] * 40, num_prompt_tokens=40, block_ids=range(3 * i, 3 * i + 3), params=p)
        for i, p in enumerate(params)
    ]
    columns = {"rows": [0, 1, 2], "samples": [True] * 3}
    runner.submit(StepPlan(step_id=0, num_tokens=[40] * 3, start_positions=[0] * 3, admitted=rows, **columns)).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [runner.submit(StepPlan(step_id=1 + i, num_tokens=[1] * 3, start_positions=[40 + i] * 3, **columns)) for i in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(not step.result().row_errors for step in pending)
    runner.close()


HELD_BYTES = 20 << 30
HOLDER = (
    f"import sys, torch; held = torch.empty({HELD_BYTES}, dtype=torch.int8, device='cuda'); print('held', flush=True); sys.stdin.read()"
)


@contextmanager
def memory_held_by(holder: str) -> Iterator[int]:
    """Bytes that are held until the block ends."""
    if holder == "nobody":
        yield 0
    elif holder == "this process":
        held = torch.empty(HELD_BYTES, dtype=torch.int8, device="cuda")
        yield held.nbytes
    else:
        with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield HELD_BYTES


@pytest.mark.parametrize("holder", ["nobody", "this process", "another process"])
def test_peak_memory_stays_within_the_budget(model_dir: Path, holder: str) -> None:
    """The budget is a share of the card; what others hold is part of it."""
    with memory_held_by(holder) as held_bytes:
        check_the_budget_is_kept(model_dir, held_bytes)


def check_the_budget_is_kept(model_dir: Path, held_bytes: int) -> None:
    config = engine_config(gpu_memory_utilization=0.3, max_num_batched_tokens=4096)
    runner, plan = build_runner(config, model_dir)
    torch.cuda.reset_peak_memory_stats()
    hungry = profiling_plan(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=plan.max_model_len, vocab_size=plan.vocab_size)
    runner.submit(hungry).result()
    free, total = torch.cuda.mem_get_info()
    assert held_bytes < total - free <= 0.3 * total
    assert plan.memory.budget_bytes <= 0.3 * total - held_bytes
    assert plan.memory.kv_cache_bytes > 0.8 * (plan.memory.budget_bytes - plan.memory.weights_bytes) - (6 << 30)
    runner.close()


def test_close_gives_the_memory_back(model_dir: Path) -> None:
    build_runner(engine_config(gpu_memory_utilization=0.3), model_dir)[0].close()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        runner, plan = build_runner(engine_config(gpu_memory_utilization=0.3), model_dir)
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken > plan.memory.kv_cache_bytes
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        assert before - torch.cuda.mem_get_info()[0] <= 0.05 * taken
