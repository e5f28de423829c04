"""Resident blocks by their parent, to say where a prompt left the nearest cached prefix."""

from __future__ import annotations

from bisect import bisect_left, insort


class BlockSiblings:
    """Owns, for each parent, the sorted contents of its resident children.

    Sorted, because the longest common prefix with a set of sequences is always had with a lexicographic neighbour.
    """

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[int, ...]]] = {}

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._children.values()))

    def add(self, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Add a child."""
        insort(self._children.setdefault(parent_key, []), token_ids)

    def remove(self, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Remove a child that was added."""
        children = self._children[parent_key]
        del children[bisect_left(children, token_ids)]
        if not children:
            del self._children[parent_key]

    def longest_common_prefix(self, parent_key: bytes, token_ids: tuple[int, ...]) -> int | None:
        """Most leading tokens shared with a child; None when there is no child."""
        children = self._children.get(parent_key)
        if not children:
            return None
        index = bisect_left(children, token_ids)
        return max(_common_prefix(token_ids, child) for child in children[max(0, index - 1) : index + 1])


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
