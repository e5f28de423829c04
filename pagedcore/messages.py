"""The two borders of the engine: what goes into its inbox and what comes out of its outbox. Plain data, picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedcore.errors import PagedCoreError
from pagedcore.outputs import CacheReport, FinishReason, Logprob, RequestTimings, Status
from pagedcore.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One choice of one request, ready for the scheduler: tokenized, seed drawn, n already unfolded."""

    request_id: str
    """Unique in the engine. Choice i > 0 of a request is `f"{group_id}#{i}"`; choice 0 is the group id itself."""
    group_id: str
    """The caller's request id: what logs, metrics and headers show."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """With n == 1 and a seed."""
    arrival_s: float
    """time.monotonic() when the front received it."""
    choice_index: int = 0
    num_choices: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    """Every id that ends the output: the caller's, and unless ignore_eos the model's."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's own end-of-sequence ids (their stop_reason is None)."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    """Lower goes first under scheduling_policy="priority"."""
    tenant: str | None = None
    cache_salt: str | None = None
    request_class: str | None = None
    user: str | None = None
    """Whom the caller names; only logs have it."""
    adapter: str = "library"
    traceparent: str | None = None
    """The caller's span, as a W3C `traceparent`."""
    routing: str | None = None
    """Why this engine got it, where a front chose among several: a `pagedcore.routing.router.Reason`."""
    is_traffic: bool | None = None
    """Whether it counts; False for what came while nothing was recorded. None until who receives it decides, and then as good as True."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Give up one choice in whatever state it is. Unknown ids are ignored (it may just have finished)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The front found a stop string: the output ends after `num_tokens` tokens; later ones are discarded."""

    request_id: str
    num_tokens: int
    stop_reason: str | None = None


InboxMessage = AddRequest | AbortRequest | FinishRequest


@dataclass(init=False)
class RequestUpdate:
    """What one step changed for one choice. The last one of a request has `finish_reason` set.

    A request rejected when it was added gets exactly one update, with status "rejected" and its error. Most updates hold one
    token and nothing else, and a step makes hundreds of them: fields at their defaults are the class's and cost nothing.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[dict[int, Logprob]] | None = None
    """One dict a new token, when the request asked for logprobs (decoded_token not filled in)."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Whole, once, with the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    status: Status = "running"
    error: PagedCoreError | None = None
    cache: CacheReport | None = None
    """With the first token, and final with the last update."""
    timings: RequestTimings | None = None
    """With the last update."""
    num_preemptions: int = 0

    def __init__(self, request_id: str, new_token_ids: list[int], **facts: Any) -> None:
        """`facts` are the other fields by name. Raises TypeError for any other name."""
        self.request_id = request_id
        self.new_token_ids = new_token_ids
        if facts:
            if not facts.keys() <= RequestUpdate.__annotations__.keys():
                raise TypeError(f"RequestUpdate has no field {min(facts.keys() - RequestUpdate.__annotations__.keys())!r}")
            vars(self).update(facts)

    @property
    def has_tokens_only(self) -> bool:
        """Nothing stands in it but new tokens."""
        return len(vars(self)) == 2


def failed_update(request_id: str, error: PagedCoreError, status: Status = "error") -> RequestUpdate:
    """The last update of a request that failed, or with status "rejected" the only one of a request that was never taken."""
    return RequestUpdate(request_id, [], finish_reason="error", status=status, error=error)
