"""Where a decode step runs: the graph it replays, and what the device is told of its rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime.decode_graphs import DecodeGraphs
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.shared_prefix import MIN_SAVED_BYTES, PADDING_ROW_BYTES
from pagedcore.sampling_params import SamplingParams
from pagedcore_kernels.reference.step_inputs import PADDING_ROW

BLOCK_SIZE = 8
NOTHING = torch.zeros(0)
BATCH = SimpleNamespace(
    buffer_rows=[], floats=dict.fromkeys(("temperature", "top_p", "min_p"), NOTHING), top_k=NOTHING, seeds=NOTHING, prompt_lens=NOTHING
)


class Placed:
    """Graphs that note their replay, over rows that are admitted with their tables; a block weighs what a prefix must save."""

    def __init__(self, sizes: list[int], block_bytes: int = MIN_SAVED_BYTES) -> None:
        self.buffers = RowBuffers(max_num_seqs=sizes[-1], max_model_len=800, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        pool = torch.empty(1, 1, block_bytes, dtype=torch.int8, device="meta")
        cache = SimpleNamespace(block_size=BLOCK_SIZE, data=pool, layout=SimpleNamespace(num_kv_heads=1))
        self.graphs = DecodeGraphs(SimpleNamespace(), cache, self.buffers, sizes=sizes, max_model_len=800)  # type: ignore[arg-type]
        self.replayed: list[str] = []
        for size in sizes:
            self.graphs._graphs[size, 800] = self._graph(f"plain {size}")
        for size in self.graphs._shared_sizes:
            self.graphs._shared_graphs[size] = self._graph(f"shared {size}")

    def _graph(self, name: str) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(replay=lambda: self.replayed.append(name)), None

    def step(self, starts: dict[int, int], admitted: dict[int, list[int]] | None = None, **changes: object) -> str:
        """One token of each row at its start, after rows with these tables have entered; the graph that ran."""
        rows = [
            AdmittedRow(row=row, request_id="", token_ids=[1], num_prompt_tokens=1, block_ids=tuple(table), params=SamplingParams())
            for row, table in (admitted or {}).items()
        ]
        ones = {"num_tokens": [1] * len(starts), "samples": [True] * len(starts), "total_num_tokens": len(starts)}
        plan = StepPlan(step_id=0, rows=tuple(starts), start_positions=[*starts.values()], admitted=rows, **ones, **changes)  # type: ignore[arg-type]
        self.buffers.apply(plan)
        self.graphs.run(plan, BATCH)  # type: ignore[arg-type]
        return self.replayed[-1]

    @property
    def lens(self) -> list[int]:
        return self.graphs._prefix.lens.tolist()


def test_rows_are_padded_to_the_size_of_their_graph() -> None:
    placed = Placed([2, 4, 64])
    assert placed.step({3: 9, 1: 9, 0: 9}, {3: [1, 2], 1: [3, 4], 0: [5, 6]}) == "plain 4"
    assert placed.graphs._rows[:4].tolist() == [3, 1, 0, PADDING_ROW]


def test_members_of_a_prefix_know_its_length_and_others_have_none() -> None:
    placed = Placed([4], -(-MIN_SAVED_BYTES // 3))
    tables = {2: [4, 5, 6, 2], 0: [7, 8, 9, 1], 1: [7, 8, 9, 3]}
    assert placed.step({2: 27, 0: 27, 1: 27}, tables) == "shared 4"
    assert placed.lens == [0, 24, 24, 0]
    assert placed.graphs._prefix.table[:3].tolist() == [7, 8, 9]
    assert placed.graphs._rows.tolist() == [2, 0, 1, PADDING_ROW]


@pytest.mark.parametrize(("start", "length"), [(15, 8), (16, 16), (17, 16)])
def test_a_block_that_the_step_fills_is_not_yet_shared(start: int, length: int) -> None:
    placed = Placed([2])
    assert placed.step({0: start, 1: 20}, {0: [7, 8, 1], 1: [7, 8, 2]}) == "shared 2"
    assert placed.lens == [length, length]


def test_a_prefix_that_saves_too_little_is_read_by_each_row() -> None:
    placed = Placed([2], MIN_SAVED_BYTES // 2 - 1)
    assert placed.step({0: 17, 1: 17}, {0: [7, 8, 1], 1: [7, 8, 2]}) == "plain 2"
    assert placed.lens == [0, 0]


@pytest.mark.parametrize(("padding_saved", "graph"), [(32, "shared 64"), (31, "plain 32")])
def test_rows_that_only_a_shared_graph_pads_must_be_saved_too(padding_saved: int, graph: str) -> None:
    """30 rows fit the plain graph of 32; a shared one computes 32 more."""
    placed = Placed([32, 64], -(-(MIN_SAVED_BYTES + padding_saved * PADDING_ROW_BYTES) // 29))
    placed.graphs._shared_sizes = [64]
    tables = {row: [99, 200 + row] for row in range(30)}
    assert placed.step(dict.fromkeys(range(30), 12), tables) == graph


def test_a_prefix_is_found_anew_when_rows_change_hands_and_kept_while_they_do_not() -> None:
    placed = Placed([2])
    assert placed.step({0: 16, 1: 16}, {0: [7, 8, 1], 1: [7, 8, 2]}) == "shared 2"
    placed.graphs._prefix.lens.fill_(-5)
    assert placed.step({0: 17, 1: 17}) == "shared 2"
    assert placed.lens == [-5, -5], "nothing was copied"
    assert placed.step({0: 18, 1: 9}, {1: [7, 3]}, released_rows=[1]) == "shared 2"
    assert placed.lens == [8, 8]
    assert placed.step({0: 19, 1: 10}, {1: [5, 3]}, released_rows=[1]) == "plain 2"
    assert placed.step({0: 20}) == "plain 2"
    assert placed.graphs._rows.tolist() == [0, PADDING_ROW]


def test_blocks_that_a_row_has_been_given_since_it_entered_are_shared_too() -> None:
    placed = Placed([2], -(-MIN_SAVED_BYTES // 3))
    assert placed.step({0: 7}, {0: [7]}) == "plain 2"
    for start, block in ((8, 8), (16, 9), (24, 1)):
        placed.step({0: start}, new_blocks=[(0, [block])])
    assert placed.step({0: 25, 1: 24}, {1: [7, 8, 9, 2]}) == "shared 2"
    assert placed.lens == [24, 24]
