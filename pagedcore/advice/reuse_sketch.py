"""One pass over the lookups: the hit rate that pools and blocks of other sizes would have had."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from pagedcore.advice.block_stack import BlockStack, Found
from pagedcore.advice.prefix_keys import PrefixKeys
from pagedcore.advice.prompt import Prompt
from pagedcore.advice.running_requests import Running, RunningRequests

POOL_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BLOCK_SIZES = (8, 16, 32, 64)

MAX_TRACKED_BLOCKS = 8192
"""Sampled blocks of one size that are remembered: some 6 MB for all sizes together."""

MAX_CROWDED_SHARE = 0.05
"""A pool is left out of the curve when more than this share of the prompt tokens came while it could not hold what ran."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The hit rate that a pool of `num_blocks` blocks of `block_size` tokens would have had, those of host memory included."""

    pool_factor: float
    """Its memory, as a multiple of the pool that there is."""
    num_blocks: int
    block_size: int
    hit_rate: float


class ReuseSketch:
    """Owns an LRU stack for each block size, and the requests that run.

    Ticks are any monotone clock: steps of a live engine, seconds of a trace. Host memory takes what the pool evicts and gives it back,
    so both together are one LRU stack; but what runs has to fit the pool's share of it.
    """

    def __init__(self, block_size: int, num_blocks: int, *, num_host_blocks: int = 0, max_tracked_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks + num_host_blocks
        """Of the pool and of host memory."""
        self._pool_share = num_blocks / self.num_blocks
        self.num_lookups = 0
        self.num_prompt_tokens = 0
        sizes = sorted({*BLOCK_SIZES, block_size})
        self.prefix_keys = PrefixKeys(gcd(*sizes))
        self.stacks = [BlockStack(size, (self.num_blocks_of(f, size) for f in POOL_FACTORS), max_tracked_blocks) for size in sizes]
        self._own_stack = self.stacks[sizes.index(block_size)]
        self._running = RunningRequests(sizes)

    def num_blocks_of(self, factor: float, block_size: int) -> int:
        """Blocks of that size in a pool of `factor` times the memory; at least one."""
        return max(1, int(self.num_blocks * self.block_size * factor) // block_size)

    def admit(self, prompt: Prompt, *, now: float, tokens_a_tick: float = 1.0) -> Found:
        """A request looks its prompt up and takes its blocks. Returns what the pool that there is had of it."""
        keys = self.prefix_keys.keys_of(prompt.domain, prompt.token_ids)
        self._note_private(now)
        found, tables = Found(), []
        for stack in self.stacks:
            sampled = stack.sample(self._block_keys(keys.keys, stack))
            if prompt.is_counted:
                looked_up = stack.look_up(sampled, keys.num_tokens, reads_cache=prompt.reads_cache)
                found = looked_up if stack is self._own_stack else found
            tables.append(stack.own(sampled))
        answer_seed = keys.answer_seed(None if prompt.is_greedy else prompt.request_id)
        self._running.add(prompt.request_id, Running(keys, tables, now, tokens_a_tick, answer_seed))
        if prompt.is_counted:
            self._count(keys.num_tokens, now)
        self._shrink()
        return found

    def finish(self, request_id: str, num_output_tokens: int, *, now: float) -> None:
        """A request gives its blocks back; unknown ids are ignored. Its last token was never computed, so no block holds it."""
        running = self._running.by_id.get(request_id)
        if running is None:
            return
        self._note_private(now)
        self._running.remove(request_id)
        prompt = running.prompt
        num_stored = prompt.num_tokens + max(0, num_output_tokens - 1)
        keys = prompt.keys + self.prefix_keys.answer_keys(prompt, running.answer_seed, num_stored)
        for stack, table in zip(self.stacks, running.tables, strict=True):
            answer = self._block_keys(keys, stack)[prompt.num_tokens // stack.block_size :]
            stack.release(table + stack.own(stack.sample(answer)))
        self.prefix_keys.remember(prompt, running.answer_seed, num_stored)
        self._shrink()

    def forget_running(self, *, now: float) -> None:
        """Take every running request for ended: what became of them is not known."""
        for request_id in list(self._running.by_id):
            self.finish(request_id, 0, now=now)

    def forget_cached(self) -> None:
        """The cache was reset; so would one of any other size have been."""
        for stack in self.stacks:
            stack.forget_cached()

    def curve(self) -> tuple[CurvePoint, ...]:
        """The hit rate of each pool factor at each block size; nothing before the first lookup.

        Pools that could not have held what ran together are left out: there requests would have waited, in another order.
        """
        return tuple(point for stack in self.stacks for point in self._points(stack)) if self.num_prompt_tokens else ()

    def hit_rate(self) -> float | None:
        """The hit rate of the pool that there is."""
        return self._rates()[POOL_FACTORS.index(1.0)] if self.num_prompt_tokens else None

    def ideal_hit_rate(self) -> float | None:
        """The hit rate of an unbounded pool of the block size that there is."""
        return self._rates()[-1] if self.num_prompt_tokens else None

    def num_evicted_tokens(self, found: Found) -> int:
        """Tokens that had been computed before and that the pool no longer held."""
        return sum(depth > self.num_blocks for depth in found.depths or ()) * (self.block_size << self._own_stack.level)

    def _block_keys(self, keys: list[int], stack: BlockStack) -> list[int]:
        """The keys at the ends of blocks of the stack's size."""
        stride = stack.block_size // self.prefix_keys.granule
        return keys[stride - 1 :: stride]

    def _note_private(self, now: float) -> None:
        for stack in self.stacks:
            stack.note_private(self._running.num_private_blocks(stack.block_size, now))

    def _count(self, num_prompt_tokens: int, now: float) -> None:
        self.num_lookups += 1
        self.num_prompt_tokens += num_prompt_tokens
        for stack in self.stacks:
            num_private_blocks = self._running.num_private_blocks(stack.block_size, now)
            stack.count_crowding(num_private_blocks, num_prompt_tokens, pool_share=self._pool_share)

    def _shrink(self) -> None:
        for stack in self.stacks:
            stack.shrink()

    def _points(self, stack: BlockStack) -> list[CurvePoint]:
        rates, shares = stack.hit_rates(self.num_prompt_tokens), stack.crowded_shares(self.num_prompt_tokens)
        return [
            CurvePoint(factor, self.num_blocks_of(factor, stack.block_size), stack.block_size, rate)
            for factor, rate, share in zip(POOL_FACTORS, rates, shares, strict=False)
            if share <= MAX_CROWDED_SHARE
        ]

    def _rates(self) -> list[float]:
        return self._own_stack.hit_rates(self.num_prompt_tokens)
