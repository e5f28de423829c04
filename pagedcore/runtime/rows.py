"""The device's persistent buffers: a running request owns one row of each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime.transfer import array_to_device, to_device


@dataclass(slots=True)
class Row:
    """What the host knows of one row in use."""

    request: AdmittedRow
    block_ids: array[int]
    """Compared slice by slice, which is quick in an array."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.params.prompt_logprobs is not None


class RowBuffers:
    """Owns token ids, their number and the block tables of all rows, on the device, and which request has which row.

    Only what changed is copied. A row's old content is not erased: tokens are read up to the row's length and blocks up
    to the block of its last token, both of which the owner has written.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """Known tokens of each row."""
        max_blocks = max_model_len // block_size + 1
        self.block_table = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.generation = 0
        """Counts changes of who has which row."""
        self._rows: dict[int, Row] = {}

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def apply(self, plan: StepPlan) -> None:
        """Take in the plan's diffs: released rows, then admitted ones, then new blocks."""
        for row in plan.released_rows:
            del self._rows[row]
        if plan.admitted:
            self._admit(plan.admitted)
        if plan.released_rows or plan.admitted:
            self.generation += 1
        if plan.new_blocks:
            self._append_blocks(plan.new_blocks)

    def write_sampled(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """token_ids[rows[i], positions[i]] = token_ids[i], in stream order: the next step reads them from there."""
        self.token_ids.index_put_((rows, positions), token_ids.to(torch.int32))
        self.lengths.index_put_((rows,), (positions + 1).to(torch.int32))

    def _admit(self, requests: Sequence[AdmittedRow]) -> None:
        """All tokens and blocks of all requests travel in one copy."""
        for request in requests:
            assert request.row not in self._rows, f"row {request.row} is admitted while it is in use"
            self._rows[request.row] = Row(request, array("i", request.block_ids))
        counts = ([len(request.token_ids) for request in requests], [len(request.block_ids) for request in requests])
        values = array("i", [*(request.row for request in requests), *counts[0], *counts[1]])
        for part in chain((request.token_ids for request in requests), (request.block_ids for request in requests)):
            values.extend(array("i", part))
        rows, *parts = array_to_device(values, self.device).split([len(requests)] * 3 + [sum(counts[0]), sum(counts[1])])
        num_tokens, num_blocks, token_ids, block_ids = parts
        self.lengths.index_put_((rows.long(),), num_tokens)
        self._write_heads(self.token_ids, rows, num_tokens, token_ids)
        self._write_heads(self.block_table, rows, num_blocks, block_ids)

    @staticmethod
    def _write_heads(target: Tensor, rows: Tensor, counts: Tensor, values: Tensor) -> None:
        """target[rows[i], : counts[i]] = the next counts[i] of `values`."""
        owner = torch.repeat_interleave(counts, output_size=len(values))
        first = counts.cumsum(0) - counts
        columns = torch.arange(len(values), device=values.device) - first[owner]
        target.index_put_((rows.long()[owner], columns), values)

    def _append_blocks(self, new_blocks: Sequence[tuple[int, Sequence[int]]]) -> None:
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for row, block_ids in new_blocks:
            state = self._rows[row]
            rows.extend([row] * len(block_ids))
            columns.extend(range(len(state.block_ids), len(state.block_ids) + len(block_ids)))
            blocks.extend(block_ids)
            state.block_ids.extend(block_ids)
        index = to_device(rows + columns + blocks, torch.int64, self.device).view(3, -1)
        self.block_table.index_put_((index[0], index[1]), index[2].to(torch.int32))
