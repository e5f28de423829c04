"""Memory arithmetic: every byte has a name, and errors name a value that works."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.batch import KVLayout
from pagedcore.errors import ConfigError
from pagedcore.runtime.memory import (
    MeasuredMemory,
    PoolRequest,
    block_bytes,
    cpu_budget_bytes,
    cuda_budget_bytes,
    plan_memory,
    resolve_max_model_len,
)
from pagedcore.runtime.probe import device_memory, profiling_plan, warming_plans

GIB = 2**30


def measured(*, total: int = 80 * GIB, others: int = 2 * GIB, weights: int = 14 * GIB, activations: int = GIB) -> MeasuredMemory:
    return MeasuredMemory(
        device="cuda:0", total_bytes=total, held_by_others_bytes=others, weights_bytes=weights, activations_bytes=activations
    )


def request(*, num_kv_blocks: int | None = None, max_model_len: int = 4096, auto: bool = False, size: int = 2**20) -> PoolRequest:
    return PoolRequest(
        block_size=16, block_bytes=size, num_kv_blocks=num_kv_blocks, max_model_len=max_model_len, is_max_model_len_auto=auto
    )


def test_block_bytes_are_keys_and_values_of_all_layers() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert block_bytes(layout, 16, torch.float32) == 2 * 30 * 3 * 64 * 16 * 4
    assert block_bytes(layout, 8, torch.bfloat16) == 2 * 30 * 3 * 64 * 8 * 2


def test_cuda_budget_is_a_share_of_the_total_minus_what_others_hold() -> None:
    assert cuda_budget_bytes(80 * GIB, 10 * GIB, 0.5) == 30 * GIB
    assert cuda_budget_bytes(80 * GIB, 60 * GIB, 0.5) == 0


def test_cpu_pool_is_a_tenth_of_free_memory_and_at_most_2_gib() -> None:
    assert cpu_budget_bytes(10 * GIB, weights_bytes=5) == 5 + GIB
    assert cpu_budget_bytes(100 * GIB, weights_bytes=5) == 5 + 2 * GIB


def test_the_pool_takes_what_the_terms_leave() -> None:
    plan = plan_memory(measured(), 70 * GIB, request())
    assert plan.num_blocks == (70 - 14 - 1) * 1024
    assert plan.kv_cache_bytes + plan.weights_bytes + plan.activations_bytes + plan.graphs_bytes <= plan.budget_bytes


@given(st.integers(0, 2**38), st.integers(1, 2**30))
def test_the_terms_never_exceed_the_budget_and_less_than_a_block_is_left(budget: int, size: int) -> None:
    memory = measured(weights=1000, activations=500)
    if budget - 1500 < size:
        with pytest.raises(ConfigError, match="No KV block fits cuda:0"):
            plan_memory(memory, budget, request(size=size))
        return
    plan = plan_memory(memory, budget, request(size=size))
    assert 0 <= budget - 1500 - plan.kv_cache_bytes < size


def test_an_exact_number_of_blocks_is_exact_whatever_the_budget() -> None:
    assert plan_memory(measured(), 0, request(num_kv_blocks=7)).num_blocks == 7


def test_an_exact_number_that_the_device_cannot_hold_names_the_largest() -> None:
    free_blocks = (80 - 2 - 14 - 1) * 1024
    with pytest.raises(ConfigError, match=f"set num_kv_blocks to at most {free_blocks}"):
        plan_memory(measured(), 70 * GIB, request(num_kv_blocks=free_blocks + 1))


def test_max_model_len_auto_shrinks_to_the_pool() -> None:
    small = request(max_model_len=8192, auto=True, num_kv_blocks=100)
    assert resolve_max_model_len(plan_memory(measured(), 0, small), small) == 1600
    large = request(max_model_len=8192, auto=True)
    assert resolve_max_model_len(plan_memory(measured(), 70 * GIB, large), large) == 8192


def test_too_large_a_max_model_len_names_the_largest_workable_value_and_that_value_works() -> None:
    budget = 15 * GIB + 100 * 2**20
    with pytest.raises(ConfigError, match=r'max_model_len is 4096 .* at most 1600 or to "auto", raise gpu_memory_utilization'):
        resolve_max_model_len(plan_memory(measured(), budget, request()), request())
    workable = request(max_model_len=1600)
    assert resolve_max_model_len(plan_memory(measured(), budget, workable), workable) == 1600


def test_an_exact_pool_below_max_model_len_is_taken_as_meant() -> None:
    exact = request(max_model_len=4096, num_kv_blocks=10)
    assert resolve_max_model_len(plan_memory(measured(), 0, exact), exact) == 4096


def test_this_machine_says_what_it_has() -> None:
    memory = device_memory(torch.device("cpu"))
    assert 0 < memory.free_bytes <= memory.total_bytes


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100))
def test_the_profiling_step_is_full_and_within_limits(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    plan = profiling_plan(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, vocab_size=10
    )
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    assert len(plan.rows) == num_rows
    assert sum(plan.num_tokens) == plan.total_num_tokens == min(max_num_batched_tokens, num_rows * max_model_len)
    assert all(start >= 0 and start + count <= max_model_len for start, count in zip(plan.start_positions, plan.num_tokens, strict=True))


@pytest.mark.parametrize("limits", [(256, 8192, 40960), (1, 512, 512), (4, 20, 64), (300, 300, 2048)])
def test_warming_steps_keep_to_the_limits_of_the_engine_and_leave_no_row(limits: tuple[int, int, int]) -> None:
    max_num_seqs, max_num_batched_tokens, max_model_len = limits
    limit = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len}
    plans = list(warming_plans(**limit, vocab_size=100, decodes=[(1, 7), (3, 60), (400, 5)]))
    steps, leaving = plans[::2], plans[1::2]
    for step, after in zip(steps, leaving, strict=True):
        assert list(after.released_rows) == [admitted.row for admitted in step.admitted] == list(step.rows)
        assert step.total_num_tokens == sum(step.num_tokens) <= max_num_batched_tokens
        assert 1 <= len(step.rows) <= max_num_seqs
        ends = [start + count for start, count in zip(step.start_positions, step.num_tokens, strict=True)]
        assert min(step.start_positions) >= 0
        assert max(ends) <= max_model_len
    assert [1] in [step.num_tokens for step in steps], "a single token alone"
    lengths = [(step.num_tokens, max(step.start_positions) + 1) for step in steps]
    assert ([1], 7) in lengths
    assert ([1] * min(3, max_num_seqs), 60) in lengths
    drawing = {
        (admitted.params.is_greedy, admitted.params.has_penalties, len(step.rows) >= 16) for step in steps for admitted in step.admitted
    }
    kinds = {(True, False), (False, False), (False, True)}
    assert drawing >= {(*kind, is_many) for kind in kinds for is_many in (False, *[True] * (max_num_seqs > 64))}
    if max_num_seqs >= 256:
        totals = [step.total_num_tokens for step in steps]
        for low, high in ((1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 192), (193, 256), (257, 8192)):
            assert any(low <= total <= high for total in totals), f"products of {low} to {high} rows are not met"
    if max_num_seqs > 64:
        assert {max(map(sum, zip(step.start_positions, step.num_tokens, strict=True))) for step in steps} >= {256, 1024}
