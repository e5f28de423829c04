"""The one way out: how a request ends, in whatever state it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedcore.core.events import Finished
from pagedcore.core.request import Request, RequestState
from pagedcore.core.state import SchedulerState
from pagedcore.errors import PagedCoreError
from pagedcore.messages import RequestUpdate
from pagedcore.outputs import CacheReport, FinishReason, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a request ends."""

    status: Status
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: PagedCoreError | None = None
    num_kept_tokens: int | None = None
    """Output tokens that count, when a stop string ended the text before the last one."""


ABORTED = Outcome(status="aborted", finish_reason="abort")
REACHED_LENGTH = Outcome(status="completed", finish_reason="length")


def failed(error: PagedCoreError) -> Outcome:
    return Outcome(status="error", finish_reason="error", error=error)


def end_request(state: SchedulerState, request: Request, outcome: Outcome, now_s: float, update: RequestUpdate | None = None) -> None:
    """Take a request out of the scheduler for good: blocks and row go back, one Finished event and the last update come out.

    `update` is the last token's, when the request ends with a token.
    """
    num_blocks, num_reused = len(request.block_ids), request.num_reused_blocks
    num_discarded = request.num_pending_tokens
    num_output = request.num_output_tokens
    if outcome.num_kept_tokens is not None and outcome.num_kept_tokens < num_output:
        num_discarded += num_output - outcome.num_kept_tokens
        num_output = outcome.num_kept_tokens
    if request.state is RequestState.RUNNING:
        state.leave_running(request, now_s)
    else:
        state.waiting.remove(request)
        state.kv.host.unwatch(request.request_id)
    request.state = RequestState.FINISHED
    del state.requests[request.request_id]
    state.record.add(
        Finished(
            request.add_request,
            now_s,
            outcome.status,
            outcome.finish_reason,
            num_output_tokens=num_output,
            num_computed_prompt_tokens=request.num_prompt_tokens_computed,
            num_abandoned_prompt_tokens=request.num_prompt_tokens_left,
            num_preemptions=request.num_preemptions,
            num_discarded_tokens=num_discarded,
            admitted_s=request.admitted_s,
            first_token_s=request.first_token_s,
            last_token_s=None if request.first_token_s is None else request.last_token_s,
            num_held_blocks=num_blocks,
            num_new_blocks=num_blocks - num_reused,
        )
    )
    state.record.updates.append(_last_update(request, outcome, now_s, update))


def _last_update(request: Request, outcome: Outcome, now_s: float, update: RequestUpdate | None) -> RequestUpdate:
    last = RequestUpdate(request.request_id, []) if update is None else update
    last.status, last.finish_reason = outcome.status, outcome.finish_reason
    last.stop_reason, last.error = outcome.stop_reason, outcome.error
    last.cache = _final_report(request)
    last.timings = request.timings(now_s)
    last.num_preemptions = request.num_preemptions
    return last


def _final_report(request: Request) -> CacheReport:
    """The partition as it turned out: T = live + pool + host + computed + abandoned."""
    report = request.cache_report or CacheReport(request.num_prompt_tokens)
    return replace(report, computed_tokens=request.num_prompt_tokens_computed, abandoned_tokens=request.num_prompt_tokens_left)
