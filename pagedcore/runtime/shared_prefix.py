"""The blocks that many rows of a decode step begin with: which they are, and whether to read them once for all pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SAVED_BYTES = 64 << 20
"""Of one layer. To read them takes as long as the two kernels more that a shared prefix needs: 10 us on an H200, from its L2 cache."""
PADDING_ROW_BYTES = 4 << 20
"""What could be read while a layer computes one row more: 0.8 us in a model of 7B parameters."""
_SMALLEST_SIZE = 32


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The blocks that some rows of a step begin with; `members` are their indices in the step, rising."""

    num_blocks: int
    members: list[int]


def shared_graph_sizes(sizes: Sequence[int]) -> list[int]:
    """Numbers of rows, of those of plain graphs, that also have a graph with a shared prefix: few, since each takes 0.1 s to record."""
    return [size for size in sizes if size == sizes[-1] or (size >= _SMALLEST_SIZE and size.bit_count() == 1)]


def min_saved_blocks(num_padding_rows: int, block_bytes: int) -> int:
    """Blocks that a shared prefix must save to pay for itself and for rows that the plain graph would not compute.

    `block_bytes` are those of one layer.
    """
    return -(-(MIN_SAVED_BYTES + num_padding_rows * PADDING_ROW_BYTES) // block_bytes)


def find_shared_prefix(tables: Sequence[Sequence[int]], limits: Sequence[int], min_saved: int) -> SharedPrefix | None:
    """The prefix that saves most blocks, None where that is less than `min_saved`. Table i counts up to its block `limits[i]`.

    Rows are compared at few lengths, each twice the one before: those that agree where it saves most are members, and the prefix
    is all that they have in common. So a row that differs early is left out, and one that differs late may halve what is saved.
    """
    shortest = -(-min_saved // max(1, len(tables) - 1))
    members = sharing = _members_at(tables, limits, shortest)
    saved, num_blocks = (len(sharing) - 1) * shortest, shortest << (max(limits) // shortest).bit_length() >> 1
    while num_blocks > shortest and (len(sharing) - 1) * num_blocks > max(saved, min_saved // 2):
        agreeing = _members_at(tables, limits, num_blocks)
        if (len(agreeing) - 1) * num_blocks > saved:
            members, saved = agreeing, (len(agreeing) - 1) * num_blocks
        num_blocks //= 2
    if len(members) < 2:
        return None
    num_common = _num_common_blocks([tables[i] for i in members], min(limits[i] for i in members))
    return SharedPrefix(num_common, members) if (len(members) - 1) * num_common >= min_saved else None


def _members_at(tables: Sequence[Sequence[int]], limits: Sequence[int], num_blocks: int) -> list[int]:
    """Rows whose last of so many blocks is the one that most have there."""
    last = {i: tables[i][num_blocks - 1] for i, limit in enumerate(limits) if limit >= num_blocks}
    commonest = Counter(last.values()).most_common(1)
    return [i for i, block in last.items() if block == commonest[0][0]]


def _num_common_blocks(tables: Sequence[Sequence[int]], limit: int) -> int:
    common = tables[0][:limit]
    for table in tables:
        if table[: len(common)] != common:
            common = common[: next(i for i, (ours, theirs) in enumerate(zip(common, table, strict=False)) if ours != theirs)]
    return len(common)
