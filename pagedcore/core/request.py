"""One request inside the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagedcore.core.block_hash import Domain, make_domain
from pagedcore.core.events import WaitingReason
from pagedcore.core.lookup import BlockHash
from pagedcore.messages import AddRequest
from pagedcore.outputs import CacheReport, Logprob, RequestTimings
from pagedcore.tenancy.limits import UNNAMED


class RequestState(Enum):
    """Where a request is: in the waiting queue (new or preempted), on a device row, or gone."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Owns the progress of one request. Written by the scheduler, its block fields by `KVCacheManager`.

    There are no phases, only positions; the plan works on future state, commit makes it true::

        0 ........ num_computed_tokens ........ num_known_tokens ........ max_total_tokens
        [ computed or scheduled | to be scheduled ][ to be sampled                      ]

    `token_ids` holds the ids known on the host. The `num_pending_tokens` known tokens beyond it are sampled in flight.
    """

    add_request: AddRequest
    max_total_tokens: int
    """Prompt and output: where it ends by length."""
    order_key: tuple[int, int]
    """(priority, arrival number): the order of service, kept over preemptions."""
    state: RequestState = RequestState.WAITING

    request_id: str = field(init=False)
    tenant: str = field(init=False)
    """Whose quotas it counts to."""
    stop_token_ids: frozenset[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_known_tokens: int = field(init=False)
    last_position: int = field(init=False)
    """Position of the last token this request may have."""
    num_computed_tokens: int = 0
    num_ever_computed_tokens: int = 0
    """High-water mark: below it, work is recomputation."""
    num_lost_tokens: int = 0
    """Computed tokens at the last preemption."""
    decode_limit: int = 0
    """A decode row may compute positions below this without a new block or an end; 0 unless the row is plainly decoding."""

    row: int = -1
    """Device row; kept after a preemption until the step in flight is committed."""
    last_step_id: int = -1
    """The newest step that computes this request."""
    is_plain: bool = False
    """Its next token needs nothing but to be handed on: it has a first token, wants no logprobs and runs."""
    is_constrained: bool = field(init=False)
    """Its next token depends on those before it in a way that the device does not know (a grammar): it is never planned ahead."""
    is_protected: bool = False
    """Holds blocks for its whole length and is never a victim."""
    num_preemptions: int = 0
    num_bypasses: int = 0
    num_prefix_waits: int = 0
    awaited_hash: BlockHash | None = None
    """The block that it waits for while another request computes it."""
    waiting_reason: WaitingReason | None = None
    """Why it was passed over itself; None while it only stands behind others."""

    domain: Domain = field(init=False)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of its leading full blocks, as far as they were needed."""
    num_published_blocks: int = 0
    num_announced_blocks: int = 0
    """Blocks up to here are announced as being computed by this request."""
    num_reused_blocks: int = 0
    num_counted_blocks: int = 0
    """Blocks up to here were counted as acquisitions; a resume does not count again."""

    cached_prompt_tokens: int = 0
    """Prompt tokens that the lookup at the first admission served."""
    cache_report: CacheReport | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Collected until they go out with the first token."""
    queued_s: float | None = None
    """When the scheduler was given it."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        request = self.add_request
        self.request_id, self.tenant = request.request_id, request.tenant or UNNAMED
        self.stop_token_ids = request.stop_token_ids
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = self.num_known_tokens = len(self.token_ids)
        self.last_position = self.max_total_tokens - 1
        self.is_constrained = request.params.structured_outputs is not None
        self.domain = make_domain(request.cache_salt, request.tenant)
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def num_pending_tokens(self) -> int:
        """Tokens being sampled in steps in flight."""
        return self.num_known_tokens - len(self.token_ids)

    @property
    def awaits_token(self) -> bool:
        """What it computes next is still being sampled, and has to be known first."""
        return self.is_constrained and self.num_pending_tokens > 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_prompt_tokens_computed(self) -> int:
        """Prompt tokens computed for the first time: neither hits nor recomputed."""
        return max(0, min(self.num_ever_computed_tokens, self.num_prompt_tokens) - self.cached_prompt_tokens)

    @property
    def num_prompt_tokens_left(self) -> int:
        """Prompt tokens neither served by the cache nor computed yet."""
        return self.num_prompt_tokens - self.cached_prompt_tokens - self.num_prompt_tokens_computed

    @property
    def was_admitted(self) -> bool:
        """True from the first admission on: a waiting request is then a preempted one."""
        return self.admitted_s is not None

    @property
    def reads_cache(self) -> bool:
        """Prompt logprobs need every prompt token computed."""
        return self.add_request.params.prompt_logprobs is None

    def timings(self, finished_s: float | None = None) -> RequestTimings:
        return RequestTimings(self.add_request.arrival_s, self.admitted_s, self.first_token_s, finished_s, self.queued_s)
