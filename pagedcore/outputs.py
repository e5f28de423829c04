"""What a caller gets back: one `RequestOutput` a request, one `CompletionOutput` a choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagedcore.errors import PagedCoreError

FinishReason = Literal["stop", "length", "abort", "error"]
Status = Literal["running", "completed", "aborted", "rejected", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the raw model distribution (fp32, before any sampling setting)."""

    logprob: float
    rank: int
    """1 is the likeliest."""
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where one request's prompt tokens came from, and why blocks missed; the partition is exact.

    `num_prompt_tokens == live + pool + host + computed + abandoned` once the request has ended; while it runs,
    `abandoned_tokens` is 0 and `computed_tokens` is what will be computed.
    """

    num_prompt_tokens: int
    num_eligible_blocks: int = 0
    num_resident_blocks: int = 0
    live_tokens: int = 0
    pool_tokens: int = 0
    host_tokens: int = 0
    computed_tokens: int = 0
    abandoned_tokens: int = 0
    miss_blocks: dict[str, int] = field(default_factory=dict)
    """Reason -> eligible blocks that were not served, one reason each."""
    diverged_at_token: int | None = None
    """First prompt token that differs from the nearest cached prefix, if there is one."""
    evicted_age_s: float | None = None
    """Seconds since the first missing block was evicted, if that is why it missed."""

    @property
    def num_cached_tokens(self) -> int:
        return self.live_tokens + self.pool_tokens + self.host_tokens


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds on the engine's monotonic clock; None for what never happened."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    queued_s: float | None = None
    """When the engine took it out of its inbox."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `text` and `token_ids` are cumulative."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict an output token: the sampled token and the likeliest alternatives."""
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and length."""
    new_text: str = ""
    """What this output adds to the one before."""
    new_token_ids: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All choices of one request at one moment. The last one of a stream has `finished` True."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    status: Status = "running"
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cache: CacheReport | None = None
    error: PagedCoreError | None = None
    """The typed error when status is "rejected" or "error"."""
    timings: RequestTimings | None = None
    num_preemptions: int = 0
    delivered_s: float | None = None
    """When its last update had come to its caller, on the clock of `timings`; None before."""

    @property
    def transport_s(self) -> float | None:
        """Client time minus engine time: tokenizing, the way to the engine and the way back. None until the request has ended."""
        at = self.timings
        if at is None or at.finished_s is None or at.queued_s is None or self.delivered_s is None:
            return None
        return (self.delivered_s - at.arrival_s) - (at.finished_s - at.queued_s)

    @property
    def num_cached_tokens(self) -> int:
        return 0 if self.cache is None else self.cache.num_cached_tokens

    @property
    def text(self) -> str:
        """What is new in the first choice: joined over a stream it is the whole text."""
        return self.outputs[0].new_text
