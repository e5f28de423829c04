"""What the prefix cache answered to one request, once, at its first admission. Facts only; `observe` names the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from pagedcore.outputs import CacheReport

BlockHash = NewType("BlockHash", bytes)
"""sha256 over the parent's hash, the domain and the block's token ids: equal hashes mean equal prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport:
    """The prefix lookup of one request of T prompt tokens with n = (T - 1) // block_size eligible blocks."""

    num_prompt_tokens: int
    block_size: int
    num_eligible_blocks: int
    num_resident_blocks: int
    """Eligible blocks whose hash is on the device, each probed by itself (L1)."""
    live_blocks: int
    """Blocks of the contiguous served prefix that had an owner at that moment."""
    pool_blocks: int
    """Blocks of the served prefix revived from the LRU pool."""
    caching_disabled: bool
    """Caching is off, or the request may not read it (prompt logprobs)."""
    missed: tuple[tuple[BlockHash, bool, bool], ...] = ()
    """Each eligible block that was not served, in order: (hash, resident behind a hole, being computed by another now).
    Empty when caching is disabled: then all n blocks missed for that reason."""
    sibling_common_tokens: int | None = None
    """At the first missing block: most leading tokens shared with a resident block of the same parent; None without one."""
    host_blocks: int = 0
    """Blocks of the served prefix, behind those of the device, that are copied back from host memory."""

    @property
    def num_hit_tokens(self) -> int:
        return self.first_missing_block * self.block_size

    @property
    def first_missing_block(self) -> int:
        return self.live_blocks + self.pool_blocks + self.host_blocks

    def provisional_report(self) -> CacheReport:
        """What is known at admission: what was not served will be computed. Why blocks missed is not in it."""
        return CacheReport(
            num_prompt_tokens=self.num_prompt_tokens,
            num_eligible_blocks=self.num_eligible_blocks,
            num_resident_blocks=self.num_resident_blocks,
            live_tokens=self.live_blocks * self.block_size,
            pool_tokens=self.pool_blocks * self.block_size,
            host_tokens=self.host_blocks * self.block_size,
            computed_tokens=self.num_prompt_tokens - self.num_hit_tokens,
        )
