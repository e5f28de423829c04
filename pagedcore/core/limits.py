"""The numbers that the scheduler obeys, resolved: nothing here is left at auto."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pagedcore.tenancy.limits import NO_TENANT_LIMITS, TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What one engine's scheduler may do. Sizes in tokens and blocks, times in seconds."""

    block_size: int
    """Tokens of one KV block."""
    num_blocks: int
    """Blocks of the pool."""
    max_model_len: int
    """Most tokens, prompt and output, of one request."""
    max_num_seqs: int
    """Most requests that run at once; also the number of device rows."""
    max_num_batched_tokens: int
    """Token budget of one step."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    watermark_fraction: float = 0.01
    """Share of the pool kept free when a request is admitted while others run."""
    max_preemptions: int = 4
    """Preemptions after which a request is readmitted only with blocks for its whole length."""
    max_batch_wait_s: float = 0.0
    """An idle engine waits at most this long for a fuller batch."""
    max_waiting_requests: int | None = None
    num_in_flight_steps: int = 1
    """1: no overlap; 2: one step is planned while another runs."""
    max_chunk_tokens: int | None = None
    """Most tokens of one request in one step, so that a long prompt leaves room for others; None is the whole budget."""
    max_prefix_wait_steps: int = 32
    """Steps that a request waits for a prefix block that another request is computing."""
    num_host_blocks: int = 0
    """Blocks that host memory holds beside the pool; 0 is no second tier."""
    max_bypasses: int = 16
    """Later requests that may be admitted before one that waits for blocks."""
    tenants: TenantLimits = NO_TENANT_LIMITS

    @property
    def watermark_blocks(self) -> int:
        return math.ceil(self.watermark_fraction * self.num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
