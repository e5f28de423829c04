"""Which steps are graphs: the smallest shape that holds them, and none that would be slow in it."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from pagedcore.core.step import StepPlan
from pagedcore.runtime.decode_graphs import DecodeGraphs, graph_sizes
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.prefill_graphs import PassShape, PrefillGraphs, max_graph_tokens, prefill_graph_shapes
from pagedcore.runtime.rows import RowBuffers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (300, [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 300])],
)
def test_decode_graphs_serve_every_number_of_rows(max_num_seqs: int, expected: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == expected


def test_beyond_the_measured_sizes_decode_graphs_come_in_equal_steps() -> None:
    assert graph_sizes(1000)[-4:] == [832, 896, 960, 1000]


def test_prefill_graphs_keep_to_the_limits_of_the_engine() -> None:
    few = [PassShape(64, 8), PassShape(128, 8), PassShape(256, 8), PassShape(512, 8)]
    assert prefill_graph_shapes(256, 512) == [*few, PassShape(512, 256)]
    assert prefill_graph_shapes(256, 1700)[4:] == [PassShape(tokens, 256) for tokens in (512, 1024, 1536, 1700)]
    assert prefill_graph_shapes(256, 8192)[-2:] == [PassShape(6144, 256), PassShape(8192, 256)]
    assert [shape for shape in prefill_graph_shapes(600, 2048) if shape.num_sequences > 8] == [
        PassShape(tokens, 600) for tokens in (664, 1024, 1536, 2048)
    ]
    assert prefill_graph_shapes(1030, 1536)[4:] == [PassShape(1094, 1030), PassShape(1536, 1030)]
    assert prefill_graph_shapes(4, 200) == [PassShape(64, 4), PassShape(128, 4)]


def test_only_passes_that_take_longer_to_launch_than_to_compute_are_graphs() -> None:
    assert max_graph_tokens(440_000_000, 8192) == 8192
    assert max_graph_tokens(1_500_000_000, 8192) == 3328
    assert max_graph_tokens(6_500_000_000, 8192) == 768
    assert max_graph_tokens(6_500_000_000, 512) == 512
    assert max_graph_tokens(70_000_000_000, 8192) == 64


@pytest.mark.parametrize(
    ("num_tokens", "samples", "expected"),
    [
        ([1, 1], [True, True], True),
        ([1, 2], [True, True], False),
        ([1, 1], [True, False], False),
        ([1] * 5, [True] * 5, False),
        ([], [], False),
    ],
)
def test_a_decode_graph_takes_steps_of_one_drawn_token_a_row(num_tokens: list[int], samples: list[bool], expected: bool) -> None:
    buffers = RowBuffers(max_num_seqs=8, max_model_len=64, block_size=8, device=CPU)
    graphs = DecodeGraphs(SimpleNamespace(), SimpleNamespace(), buffers, sizes=[1, 2, 4], max_model_len=64)  # type: ignore[arg-type]
    rows = list(range(len(num_tokens)))
    plan = StepPlan(
        step_id=0, rows=rows, num_tokens=num_tokens, start_positions=[5] * len(rows), samples=samples, total_num_tokens=sum(num_tokens)
    )
    assert graphs.serves(plan) is expected


def pass_inputs(query_lens: list[int], seq_lens: list[int], num_logits: int) -> PassInputs:
    locations = [0, *accumulate(query_lens)]
    nothing = torch.zeros(0, dtype=torch.int64)
    return PassInputs(
        query_start_loc=locations,
        seq_lens=seq_lens,
        device_query_start_loc=torch.tensor(locations, dtype=torch.int32),
        device_seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        block_tables=torch.zeros(len(seq_lens), 1, dtype=torch.int32),
        logits_indices=torch.zeros(num_logits, dtype=torch.int64),
        opened_blocks=None,
    )


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_logits", "expected"),
    [
        ([64], [64], 1, PassShape(64, 8)),
        ([60, 5], [60, 500], 2, PassShape(128, 8)),
        ([1] * 8 + [40], [9] * 8 + [40], 9, PassShape(512, 256)),
        ([30], [30], 29, PassShape(512, 256)),
        ([513], [513], 1, None),
        ([30, 1], [30, 8192], 2, PassShape(64, 8)),
        ([30, 1], [30, 8193], 2, None),
        ([30, 2], [30, 9000], 2, PassShape(64, 8)),
    ],
)
def test_the_smallest_prefill_graph_that_fits_is_taken(
    query_lens: list[int], seq_lens: list[int], num_logits: int, expected: PassShape | None
) -> None:
    cache = SimpleNamespace(block_size=8)
    graphs = PrefillGraphs(SimpleNamespace(), cache, shapes=prefill_graph_shapes(256, 512), max_blocks=4, device=CPU)  # type: ignore[arg-type]
    assert graphs.shape_for(pass_inputs(query_lens, seq_lens, num_logits)) == expected
