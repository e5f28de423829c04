"""What happened in the core, for `observe`. Rare facts have an event each; per-token facts come once a step, in bulk.

Times are seconds on the engine's monotonic clock, given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedcore.core.lookup import BlockHash, LookupReport
from pagedcore.host_tier.swapped import Swapped
from pagedcore.messages import AddRequest
from pagedcore.outputs import FinishReason, Status

RejectReason = Literal["too_long", "pool_too_small", "queue_full", "tenant_quota", "deadline", "invalid"]
WaitingReason = Literal["blocks", "max_num_seqs", "token_budget", "tenant_quota", "priority", "batch_window", "next_step"]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request reached the scheduler. Followed by exactly one Finished."""

    request: AddRequest
    now_s: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """First admission. `lookup` is None for choices i > 0 of n: n > 1 is one lookup."""

    request_id: str
    now_s: float
    lookup: LookupReport | None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A plan found no blocks for a waiting request, or waits for its prefix, or its tenant is at a quota, and looked at later ones; or
    no plan was made, since an idle engine waits for a fuller batch.

    Once for each stretch of a stay in the queue. `reason` None: that is over, and it waits as those beside it do.
    """

    request_id: str
    now_s: float
    reason: WaitingReason | None = "blocks"


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens of one request scheduled in one step."""

    request_id: str
    now_s: float
    num_tokens: int
    step_id: int = 0
    """The step that computes them: with steps in flight a later one than the step whose commit tells of them."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first output token was committed."""

    request_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request gave its blocks back and waits again."""

    request_id: str
    now_s: float
    num_lost_tokens: int
    """Computed tokens given back, at most what must be computed again."""
    usage_before: float
    usage_after: float
    """Share of the pool's blocks that are active."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A preempted request was admitted again."""

    request_id: str
    now_s: float
    num_recomputed_tokens: int
    """Tokens computed before the preemption that the cache did not give back."""


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A cached block without owner lost its hash to make room."""

    block_hash: BlockHash
    now_s: float
    num_reuses: int
    """Acquisitions by a request other than the writer."""
    lifetime_s: float
    idle_s: float
    tenant: str = ""
    """Whose it was; told where tenants have shares of the cache."""


@dataclass(frozen=True, slots=True)
class BlocksForgotten:
    """Blocks lost their hashes, and not to make room: the cache was reset, or what a step was to write in them is doubtful."""

    block_hashes: list[BlockHash]
    now_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request."""

    request: AddRequest
    now_s: float
    status: Status
    finish_reason: FinishReason | None
    reject_reason: RejectReason | None = None
    num_output_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    """Prompt tokens computed for the first time (not hits, not recomputed)."""
    num_abandoned_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    """Tokens generated past a stop string, or in flight when the request ended."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_held_blocks: int = 0
    """Blocks in its table when it ended."""
    num_new_blocks: int = 0
    """Of those, blocks that were not reused."""


Event = (
    Arrived | Admitted | PassedOver | PrefillChunk | FirstToken | Preempted | Resumed | Swapped | BlockEvicted | BlocksForgotten | Finished
)


@dataclass(slots=True, kw_only=True)
class StepEvents:
    """Everything since the last commit, the step itself in bulk. `step_id` is None for events outside a step."""

    now_s: float
    events: list[Event] = field(default_factory=list)
    step_id: int | None = None
    submitted_s: float | None = None
    """When this step was handed to the device; None leaves its duration, and so step and penalty seconds, unmeasured."""
    num_tokens: int = 0
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    inter_token_gaps_s: list[float] = field(default_factory=list)
    """One entry a token after a request's first. Many are equal: count them before use."""
    num_reused_acquisitions: int = 0
    num_fresh_acquisitions: int = 0
    reuse_gaps_s: list[float] = field(default_factory=list)
    """Seconds between two acquisitions of a cached block, one entry a reuse by another request than the writer."""
    avoidable_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of this step whose block had been computed before, by miss reason ("evicted", "in_flight"); filled by observe."""
    planned_s: float | None = None
    """When the last plan since the last commit looked at the waiting queue; None when none did."""
    stop_key: tuple[int, WaitingReason] | None = None
    """Where that plan stopped looking: the priority class of the request, and why. All behind it wait for that. None: it looked at all."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    """Blocks that this step copied to host memory and back, whoever they belong to."""
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    """Of the waiting requests, preempted ones of which blocks were copied to host memory."""
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    num_active_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    num_live_tokens: int = 0
    """Filled slots of active blocks: computed tokens of running requests, those that several share counted once."""
