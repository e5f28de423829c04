"""The plain paged attention, against dense attention in fp64."""

from __future__ import annotations

import pytest
import torch

from pagedcore_kernels import compute_slot_mapping, paged_attention, write_kv
from support.paged_attention_cases import make_case


@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 300])
def test_reference_equals_dense_attention_over_permuted_blocks(block_size: int, sliding_window: int | None) -> None:
    case = make_case(query_lens=[1, 5, 129, 1], context_lens=[700, 0, 33, 0], block_size=block_size, num_heads=3, num_kv_heads=1)
    cache, inputs = case.cache, case.inputs
    cache.data[1].flatten(0, 1)[_unused_slots(case)] = float("nan")
    write_kv(case.key, case.value, cache.keys(1), cache.values(1), inputs.slot_mapping)
    out = torch.full_like(case.query, float("nan"))
    result = paged_attention(
        case.query,
        cache.keys(1),
        cache.values(1),
        inputs.block_tables,
        torch.tensor(inputs.seq_lens),
        torch.tensor(inputs.query_start_loc),
        scale=0.125,
        sliding_window=sliding_window,
        out=out,
    )
    assert result is out
    torch.testing.assert_close(out.double(), case.dense(0.125, sliding_window), atol=2e-5, rtol=1e-4)


def test_each_element_of_a_tokens_heads_goes_to_its_place() -> None:
    generator = torch.Generator().manual_seed(0)
    cache, query = torch.randn(1, 8, 1, 4, generator=generator), torch.randn(3, 2, 4, generator=generator)
    sizes = {"block_tables": torch.tensor([[0]]), "seq_lens": torch.tensor([5]), "query_start_loc": torch.tensor([0, 3]), "scale": 1.0}
    places = torch.randperm(8, generator=generator).int()
    plain = paged_attention(query, cache, cache, **sizes).flatten(1)
    placed = paged_attention(query, cache, cache, **sizes, out_places=places).flatten(1)
    for element, place in enumerate(places.tolist()):
        assert torch.equal(placed[:, place], plain[:, element])


def _unused_slots(case) -> torch.Tensor:
    """Slots of the tables' blocks behind each sequence's end: NaN there must not matter to the reference."""
    used = []
    for row, seq_len in enumerate(case.inputs.seq_lens):
        positions = torch.arange(seq_len)
        used.append(compute_slot_mapping(case.inputs.block_tables, torch.full_like(positions, row), positions, case.cache.block_size))
    is_used = torch.zeros(case.cache.data[1].flatten(0, 1).shape[0], dtype=torch.bool)
    is_used[torch.cat(used)] = True
    return (~is_used).nonzero().view(-1)


def test_a_sequence_without_queries_is_skipped() -> None:
    cache = torch.randn(2, 8, 1, 4)
    query = torch.randn(1, 1, 4)
    out = paged_attention(query, cache, cache, torch.tensor([[0], [1]]), torch.tensor([3, 1]), torch.tensor([0, 0, 1]), scale=1.0)
    torch.testing.assert_close(out, cache[1, :1])


def test_slots_are_computed_in_64_bits() -> None:
    """Block 2^28 of 16 tokens begins at slot 2^32; times 2 K D elements that is far beyond 2^31."""
    tables = torch.tensor([[3, 2**28], [2**31 - 1, 0]], dtype=torch.int32)
    slots = compute_slot_mapping(tables, torch.tensor([0, 0, 1]), torch.tensor([5, 16 + 7, 15]), 16)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [3 * 16 + 5, 2**28 * 16 + 7, (2**31 - 1) * 16 + 15]


def test_write_kv_touches_only_the_named_slots() -> None:
    cache = torch.zeros(3, 8, 4, 2)
    key, value = torch.full((2, 2, 2), 1.0), torch.full((2, 2, 2), 2.0)
    write_kv(key, value, cache[:, :, :2], cache[:, :, 2:], torch.tensor([17, 3]))
    assert cache.flatten(0, 1).sum((1, 2)).nonzero().view(-1).tolist() == [3, 17]
    assert cache[2, 1].tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
