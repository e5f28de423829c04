"""The runtime's attention, against dense attention in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedcore.batch import AttentionSpec, ElementOrder, Rotation
from pagedcore.errors import ConfigError
from pagedcore.runtime.attention import ATTENTION_BACKENDS, PagedAttention, select_attention_backend
from pagedcore.runtime.decode_groups import _Span, cut_into_groups
from pagedcore.runtime.triton_attention import takes_cudnn
from pagedcore_kernels import has_triton
from support.paged_attention_cases import TOLERANCE, PagedCase, make_case


def attend(case: PagedCase, *, scale: float = 0.125, sliding_window: int | None = None, workspace_slots: int = 4096) -> torch.Tensor:
    layout = case.cache.layout
    workspace = torch.full((workspace_slots, 2 * layout.num_kv_heads, layout.head_dim), float("nan"), dtype=case.query.dtype)
    attention = PagedAttention(case.inputs, case.cache, workspace)
    return attention.forward(1, case.query, case.key, case.value, scale=scale, sliding_window=sliding_window)


def check(case: PagedCase, *, sliding_window: int | None = None, workspace_slots: int = 4096) -> None:
    actual = attend(case, sliding_window=sliding_window, workspace_slots=workspace_slots)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(actual.double(), case.dense(0.125, sliding_window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (3, 1, 80), (9, 3, 64), (5, 1, 128)])
def test_mixed_batch_over_permuted_blocks_equals_dense(block_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(
        make_case(
            query_lens=[1, 5, 129, 1, 1, 3],
            context_lens=[1100, 0, 260, 0, 37, 8],
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    )


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 100, 5000])
def test_sliding_window_equals_dense(sliding_window: int) -> None:
    case = make_case(query_lens=[1, 300, 40, 1, 1], context_lens=[500, 0, 90, 0, 15], num_heads=6, num_kv_heads=2)
    check(case, sliding_window=sliding_window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_dense(dtype: torch.dtype) -> None:
    check(make_case(query_lens=[1, 33, 1, 1], context_lens=[200, 70, 190, 3], num_heads=9, num_kv_heads=3, dtype=dtype))


@pytest.mark.parametrize("workspace_slots", [320, 640, 100_000])
def test_decode_rows_in_any_grouping_equal_dense(workspace_slots: int) -> None:
    check(make_case(query_lens=[1] * 9, context_lens=[250, 3, 260, 255, 4, 299, 120, 130, 0]), workspace_slots=workspace_slots)


def test_rows_of_one_length_attend_as_one_group_in_order() -> None:
    check(make_case(query_lens=[1] * 4, context_lens=[50, 51, 52, 53]))


def test_a_long_prefill_is_masked_in_pieces() -> None:
    check(make_case(query_lens=[600], context_lens=[500], num_heads=2, num_kv_heads=2, head_dim=64))


def test_junk_outside_a_rows_tokens_never_reaches_its_output() -> None:
    case = make_case(query_lens=[1, 7], context_lens=[20, 3])
    clean = attend(case)
    inside = case.cache.data[1].abs() < 1e3
    case.cache.data[1][~inside & ~case.cache.data[1].isnan()] = -3e4
    assert torch.equal(attend(case), clean)


def test_keys_of_the_same_pass_are_seen_by_other_sequences() -> None:
    """Sequence 1 shares the blocks that sequence 0 fills in this very pass."""
    case = make_case(query_lens=[32, 1], context_lens=[0, 32])
    case.inputs.block_tables[1, :2] = case.inputs.block_tables[0, :2]
    case.keys[1][:32], case.values[1][:32] = case.keys[0], case.values[0]
    check(case)


def test_a_tokens_elements_come_in_the_order_asked_for() -> None:
    case = make_case(query_lens=[1, 7, 1], context_lens=[20, 3, 33], num_heads=4, num_kv_heads=2)
    layout, generator = case.cache.layout, torch.Generator().manual_seed(0)
    workspace = torch.zeros(512, 2 * layout.num_kv_heads, layout.head_dim)
    attention = PagedAttention(case.inputs, case.cache, workspace)
    qkv = torch.randn(9, 8, layout.head_dim, generator=generator)
    cos = torch.ones(9, 1, layout.head_dim // 2)
    rotation = Rotation(cos_sin=cos, positions=cos, cos=cos, sin=0 * cos, query_norm=None, key_norm=None, eps=0.0)
    spec = AttentionSpec(layer=1, num_heads=4, scale=0.125, sliding_window=None)
    order = ElementOrder.of(torch.randperm(4 * layout.head_dim, generator=generator).int())
    plain = attention.attend(qkv, rotation, spec)
    ordered = attention.attend(qkv, rotation, replace(spec, out_order=order))
    assert torch.equal(ordered, plain[:, order.taken.long()])
    assert torch.equal(ordered[:, order.places.long()], plain)


def test_groups_bound_padding_and_capacity() -> None:
    spans = [_Span(index, 0, blocks) for index, blocks in enumerate([10, 9, 7, 6, 3, 1])]
    assert [[span.segment for span in group] for group in cut_into_groups(spans, 1000)] == [[0, 1, 2], [3], [4], [5]]
    assert [[span.segment for span in group] for group in cut_into_groups(spans, 20)] == [[0, 1], [2, 3], [4], [5]]
    assert [[span.segment for span in group] for group in cut_into_groups(spans[:1], 10)] == [[0]]


def test_backend_is_chosen_in_one_place() -> None:
    assert select_attention_backend(torch.device("cpu")) == "torch"
    assert select_attention_backend(torch.device("cuda")) == ("triton" if has_triton() else "torch")
    assert set(ATTENTION_BACKENDS) == {"torch", "triton"}
    with pytest.raises(ConfigError, match="'flash' and must be auto or one of torch, triton"):
        select_attention_backend(torch.device("cpu"), "flash")


def test_long_prompts_go_to_cudnn_where_it_was_measured_alone() -> None:
    measured = {"capability": 90, "head_dim": 128, "element_bytes": 2, "sliding_window": None}
    assert takes_cudnn(**measured)
    for change in ({"capability": 75}, {"capability": 80}, {"head_dim": 80}, {"element_bytes": 4}, {"sliding_window": 4096}):
        assert not takes_cudnn(**(measured | change))
