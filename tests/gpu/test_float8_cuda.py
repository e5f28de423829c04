"""Keys and values of float8 e4m3 on a CUDA card: what is written and read, by which kernels, and what the engine makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedcore.runtime import shared_prefix
from support import runner_checks, runner_driver
from support.paged_attention_cases import TOLERANCE, make_case

pytest.importorskip("triton")

from pagedcore_kernels.triton_ops import attention_common
from pagedcore_kernels.triton_ops.attention_common import Card
from support import pointwise_checks
from support.attention_problems import Problem, Sizes

pytestmark = pytest.mark.gpu

FLOAT8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DECODED = (1, 0, 16, 37, 1100, 2048, 333)
QUERIES, CONTEXTS = (1, 5, 129, 0, 1, 300, 64), (1100, 0, 260, 9, 37, 700, 0)


@pytest.fixture(autouse=True)
def exact_reference():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(params=["the card's own type", "bytes"])
def _float8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are what kernels get on cards before sm_89."""
    capability = torch.cuda.get_device_capability()
    if request.param == "bytes":
        monkeypatch.setattr(attention_common, "card_of", lambda device: Card(80, 1))
    elif capability < (8, 9):
        pytest.skip("Triton has no 8-bit floats before sm_89")


def decode_problem(*seq_lens: int, seed: int = 0, **others: object) -> Problem:
    sizes = Sizes(query_lens=(1,) * len(seq_lens), seq_lens=seq_lens, cache_dtype=FLOAT8, **others)
    return Problem(sizes, "cuda", seed)


def prefill_problem(seed: int = 0, **others: object) -> Problem:
    seq_lens = tuple(query + context for query, context in zip(QUERIES, CONTEXTS, strict=True))
    return Problem(Sizes(query_lens=QUERIES, seq_lens=seq_lens, cache_dtype=FLOAT8, **others), "cuda", seed)


@pytest.mark.usefixtures("_float8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_equals_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    common = {"head_dim": head_dim, "dtype": dtype}
    problem = decode_problem(*DECODED, num_heads=28, num_kv_heads=4, **common)
    problem.assert_close(problem.decode())
    problem = prefill_problem(num_heads=6, num_kv_heads=2, **common, sliding_window=100, soft_cap=20.0)
    problem.assert_close(problem.prefill())
    problem = prefill_problem(num_heads=7, seed=1, **common)
    problem.assert_close(problem.prefill())


@pytest.mark.usefixtures("_float8")
@pytest.mark.parametrize("num_sequences", [3, 100])
def test_a_shared_prefix_equals_the_reference(num_sequences: int) -> None:
    lens = [128 * 16 + 7 * index + 1 for index in range(num_sequences)]
    problem = decode_problem(*lens, num_heads=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    problem.assert_close(problem.decode_shared(problem.share(100, (1,))))


def test_a_gathered_run_by_cudnn_equals_the_reference() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the runtime gives it to cards of sm_90 alone")
    sizes = Sizes(query_lens=(513,), seq_lens=(2562,), num_heads=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16, cache_dtype=FLOAT8)
    problem = Problem(sizes, "cuda")
    problem.assert_close(problem.prefill_cudnn())


@pytest.mark.usefixtures("_float8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float8_is_read_as_what_it_is(dtype: torch.dtype) -> None:
    """One key a sequence: the output is its value, each of the 256."""
    problem = decode_problem(*(1,) * 4, num_heads=1, dtype=dtype)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    problem.cache.view(torch.uint8)[problem.block_tables[:, 0].long(), 0, 1] = codes.view(4, 64)
    actual = problem.decode().flatten().float()
    assert actual.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(actual.nan_to_num(), codes.view(FLOAT8).float().nan_to_num())


@pytest.mark.usefixtures("_float8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_written_as_the_nearest_float8(dtype: torch.dtype) -> None:
    pointwise_checks.check_float8_values(dtype, "cuda")


@pytest.mark.usefixtures("_float8")
def test_a_query_beyond_the_range_of_16_bits_meets_its_keys() -> None:
    problem = decode_problem(20, 40, num_heads=1, dtype=torch.bfloat16)
    problem.query *= 1e6
    assert bool(problem.decode().isfinite().all())


def test_the_torch_back_end_equals_dense() -> None:
    lens = {"query_lens": [1, 5, 129, 1, 3], "context_lens": [700, 0, 60, 37, 8]}
    case = make_case(**lens, num_heads=6, num_kv_heads=2, dtype=torch.bfloat16, cache_dtype=FLOAT8, device="cuda")
    from pagedcore.runtime.attention import PagedAttention

    workspace = torch.full((4096, 4, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    actual = PagedAttention(case.inputs, case.cache, workspace).forward(1, case.query, case.key, case.value, scale=0.125)
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(actual.double(), case.dense(0.125, None), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["torch", "triton", "triton and graphs"])
@pytest.mark.parametrize("check", runner_checks.TOKEN_CHECKS.values(), ids=runner_checks.TOKEN_CHECKS)
def test_scheduling_does_not_change_tokens(check, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_driver, "KV_CACHE_DTYPE", FLOAT8)
    monkeypatch.setattr(runner_driver, "ATTENTION_BACKEND", backend.split(maxsplit=1)[0])
    monkeypatch.setattr(runner_driver, "CAPTURES_GRAPHS", "graphs" in backend)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(shared_prefix, "PADDING_ROW_BYTES", 0)
    check("cuda")


def test_the_pool_takes_what_the_plan_leaves_in_blocks_of_half_the_size(tmp_path: Path) -> None:
    from pagedcore.config import EngineConfig
    from pagedcore.runtime.build import build_runner

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 512, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "gpu_memory_utilization": 0.1, "max_num_seqs": 8}
    sizes = []
    for kv_cache_dtype in ("auto", "fp8"):
        runner, plan = build_runner(EngineConfig(**options, kv_cache_dtype=kv_cache_dtype), tmp_path)
        memory = plan.memory
        sizes.append(memory.block_bytes)
        room_bytes = memory.budget_bytes - memory.weights_bytes - memory.activations_bytes - memory.graphs_bytes
        assert memory.num_blocks == room_bytes // memory.block_bytes, "all that others leave"
        runner.close()
    assert sizes[0] == 2 * sizes[1]
