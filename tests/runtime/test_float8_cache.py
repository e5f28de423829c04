"""Keys and values stored as float8 e4m3: how they are rounded, and that what a runner promises holds with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedcore.batch import KVLayout
from pagedcore.commands.scoring import _scorer
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.runtime.attention import PagedAttention
from pagedcore.runtime.build import build_runner, resolve_kv_cache_dtype
from pagedcore_kernels import to_cache
from support import runner_checks, runner_driver
from support.paged_attention_cases import TOLERANCE, make_case

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-9


def test_every_value_of_a_cache_is_kept_and_others_go_to_the_nearest() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    assert torch.equal(to_cache(values.float(), FLOAT8).view(torch.uint8), values.view(torch.uint8))
    above, between = 1 + 2**-4 + 2**-12, torch.tensor([1 + 2**-4, 1 + 3 * 2**-4])
    assert to_cache(torch.tensor([above, -above]), FLOAT8).tolist() == [1.125, -1.125]
    assert to_cache(between, FLOAT8).tolist() == [1.0, 1.25], "ties go to even"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_beyond_the_range_becomes_the_largest_and_nan_stays_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([449.0, -500.0, 60000.0, float("inf"), -float("inf"), SMALLEST / 3, -SMALLEST], dtype=dtype)
    assert to_cache(values, FLOAT8).tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST, -LARGEST, 0.0, -SMALLEST]
    assert bool(to_cache(torch.tensor([float("nan")], dtype=dtype), FLOAT8).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliding_window", [None, 33])
def test_attention_over_values_that_the_cache_holds_equals_dense(dtype: torch.dtype, sliding_window: int | None) -> None:
    lens = {"query_lens": [1, 5, 129, 1, 3], "context_lens": [700, 0, 60, 37, 8]}
    case = make_case(**lens, num_heads=6, num_kv_heads=2, dtype=dtype, cache_dtype=FLOAT8)
    workspace = torch.full((4096, 4, 64), float("nan"), dtype=dtype)
    attention = PagedAttention(case.inputs, case.cache, workspace)
    actual = attention.forward(1, case.query, case.key, case.value, scale=0.125, sliding_window=sliding_window)
    torch.testing.assert_close(actual.double(), case.dense(0.125, sliding_window), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_prompt_attends_to_its_keys_as_later_steps_will_find_them() -> None:
    case = make_case(query_lens=[40], context_lens=[0], num_heads=2, num_kv_heads=1, cache_dtype=FLOAT8)
    attention = PagedAttention(case.inputs, case.cache, torch.zeros(256, 2, 64))
    exact = attention.forward(1, case.query, case.key, case.value, scale=0.125)
    finer = attention.forward(1, case.query, case.key * (1 + 2**-7), case.value * (1 - 2**-7), scale=0.125)
    assert torch.equal(exact, finer)


@pytest.mark.parametrize("check", runner_checks.TOKEN_CHECKS.values(), ids=runner_checks.TOKEN_CHECKS)
def test_scheduling_does_not_change_tokens(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_driver, "KV_CACHE_DTYPE", FLOAT8)
    check("cpu")


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 4), ("bfloat16", 2)])
def test_a_pool_of_the_same_bytes_holds_more_blocks(tmp_path: Path, name: str, dtype: str, ratio: int) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "max_position_embeddings": 64, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = {"load_format": "dummy", "device": "cpu", "dtype": dtype, "num_kv_blocks": 4, "max_num_seqs": 2}
    plans = []
    for kv_cache_dtype in ("auto", name):
        runner, plan = build_runner(EngineConfig(**common, kv_cache_dtype=kv_cache_dtype), tmp_path)
        assert runner._cache.data.nbytes == plan.memory.kv_cache_bytes
        plans.append(plan)
    assert [plan.kv_cache_dtype for plan in plans] == [dtype, "fp8_e4m3"]
    assert plans[0].memory.block_bytes == ratio * plans[1].memory.block_bytes == 2 * 2 * 2 * 8 * 16 * ratio


def test_a_text_is_scored_with_keys_stored_as_the_engine_stores_them() -> None:
    tiny = SimpleNamespace(device="cpu", dtype=torch.float32, kv_layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=16))
    for name, dtype in (("auto", torch.float32), ("fp8", FLOAT8)):
        side = SimpleNamespace(config=EngineConfig(kv_cache_dtype=name))
        assert _scorer(side, tiny, 32)._cache.data.dtype == dtype


def test_eight_bit_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' is not offered by this version; use 'fp8'"):
        EngineConfig(kv_cache_dtype="int8")


def test_auto_is_the_models_dtype() -> None:
    assert resolve_kv_cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    assert resolve_kv_cache_dtype("fp8", torch.float16) == resolve_kv_cache_dtype("fp8_e4m3", torch.float32) == FLOAT8
