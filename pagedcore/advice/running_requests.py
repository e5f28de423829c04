"""The requests that run, and what they hold that nobody can find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from pagedcore.advice.block_stack import Tracked
from pagedcore.advice.prefix_keys import PromptKeys

MAX_COUNTED_ONE_BY_ONE = 16
"""Running requests whose partly filled blocks are counted; of more the average is taken."""


@dataclass(slots=True)
class Running:
    """A request that holds its blocks."""

    prompt: PromptKeys
    tables: list[list[Tracked]]
    """Its sampled blocks, in each stack."""
    started: float
    tokens_a_tick: float
    answer_seed: int

    def num_private_blocks(self, block_size: int, now: float) -> int:
        """Blocks behind the last full one of its prompt."""
        return ceil((self.prompt.num_tokens % block_size + self.tokens_a_tick * (now - self.started)) / block_size)


class RunningRequests:
    """Owns the requests that run, and sums over them."""

    def __init__(self, block_sizes: Iterable[int]) -> None:
        self.by_id: dict[str, Running] = {}
        self._pace = 0.0
        self._offset = 0.0
        self._tail_tokens = dict.fromkeys(block_sizes, 0)

    def add(self, request_id: str, running: Running) -> None:
        self.by_id[request_id] = running
        self._count(running, 1)

    def remove(self, request_id: str) -> None:
        self._count(self.by_id.pop(request_id), -1)

    def num_private_blocks(self, block_size: int, now: float) -> float:
        """Blocks that are partly filled or hold generated tokens. Exact for few requests; of many, the last is taken to be half full."""
        if len(self.by_id) <= MAX_COUNTED_ONE_BY_ONE:
            return sum(running.num_private_blocks(block_size, now) for running in self.by_id.values())
        num_tokens = self._tail_tokens[block_size] + max(0.0, self._pace * now - self._offset)
        return num_tokens / block_size + len(self.by_id) * (block_size - 1) / (2 * block_size)

    def _count(self, running: Running, sign: int) -> None:
        self._pace += sign * running.tokens_a_tick
        self._offset += sign * running.tokens_a_tick * running.started
        for size in self._tail_tokens:
            self._tail_tokens[size] += sign * (running.prompt.num_tokens % size)
