"""Making a step true: its tokens go to their requests, and requests that are done end."""

from __future__ import annotations

from itertools import chain

from pagedcore.core.ending import REACHED_LENGTH, Outcome, end_request, failed
from pagedcore.core.events import FirstToken
from pagedcore.core.request import Request, RequestState
from pagedcore.core.state import InFlightStep, SchedulerState
from pagedcore.core.step import StepResult
from pagedcore.errors import EngineError, InvalidRequestError, PagedCoreError
from pagedcore.messages import RequestUpdate


def commit_step(state: SchedulerState, step: InFlightStep, result: StepResult, now_s: float) -> None:
    """Apply a step's result. Rows of requests that ended meanwhile are discarded."""
    assert len(result.sampled_token_ids) == len(step.sampling_requests), "the runner must return one token a sampling row"
    state.last_done_step_id = step.plan.step_id
    state.kv.complete_step(step.plan.step_id, now_s)
    _count_step(state, step, now_s)
    if result.row_errors:
        _end_failed_rows(state, step, result.row_errors, now_s)
    if result.prompt_logprobs:
        _collect_prompt_logprobs(step, result)
    _hand_out_tokens(state, step, result, now_s)


def fail_step(state: SchedulerState, step: InFlightStep, error: PagedCoreError, now_s: float) -> None:
    """End the requests of a failed step, and those that share a block which it was to fill; forget what may be wrong in the cache.

    What it was to copy out may be missing in host memory, so whatever later steps copy back is as doubtful.
    """
    plan, kv, block_size = step.plan, state.kv, state.limits.block_size
    state.last_done_step_id = plan.step_id
    suspect = {block_id for each in (step, *state.in_flight) for block_id, _ in each.plan.copies_in}
    for request, start, num_tokens in zip(step.requests, plan.start_positions, plan.num_tokens, strict=True):
        suspect.update(kv.table_in_flight(request)[start // block_size : state.limits.blocks_for(start + num_tokens)])
    readers = chain(state.running, *(later.requests for later in state.in_flight))
    sharers = (request for request in readers if not suspect.isdisjoint(kv.table_in_flight(request)))
    lost = [request for request in dict.fromkeys(chain(step.requests, sharers)) if request.state is not RequestState.FINISHED]
    kv.distrust(lost, now_s)
    for request in lost:
        end_request(state, request, failed(error), now_s)
    kv.complete_step(plan.step_id, now_s)


def _count_step(state: SchedulerState, step: InFlightStep, now_s: float) -> None:
    bulk = state.record.step
    bulk.now_s, bulk.step_id = now_s, step.plan.step_id
    bulk.num_tokens += step.plan.total_num_tokens
    bulk.num_sequences += len(step.requests)
    bulk.num_prefill_tokens += step.num_prefill_tokens
    bulk.num_swapped_out_blocks += len(step.plan.copies_out)
    bulk.num_swapped_in_blocks += len(step.plan.copies_in)


def _hand_out_tokens(state: SchedulerState, step: InFlightStep, result: StepResult, now_s: float) -> None:
    """Append each sampled token to its request; all that is not plain decoding goes the long way."""
    block_size = state.limits.block_size
    add_update, publish = state.record.updates.append, state.kv.publish
    gaps: list[float] = []
    rows = zip(step.sampling_requests, step.sampled_positions, result.sampled_token_ids, strict=True)
    for request, position, token in rows:
        if request.is_plain and position < request.last_position and token not in request.stop_token_ids:
            request.token_ids.append(token)
            gaps.append(now_s - request.last_token_s)
            request.last_token_s = now_s
            add_update(RequestUpdate(request.request_id, [token]))
            if position % block_size == 0:
                publish(request, position, now_s)
        elif request.state is not RequestState.FINISHED:
            _hand_out_token(state, request, token, result, now_s)
    state.record.step.inter_token_gaps_s += gaps
    state.record.step.num_generated_tokens += len(gaps)


def _hand_out_token(state: SchedulerState, request: Request, token: int, result: StepResult, now_s: float) -> None:
    """One token with everything that can come with it: logprobs, a first token's reports, a full block, the end."""
    request.token_ids.append(token)
    state.record.step.num_generated_tokens += 1
    update = RequestUpdate(request.request_id, [token])
    if request.add_request.params.logprobs is not None:
        update.new_logprobs = [result.logprobs[request.row]]
    if request.first_token_s is None:
        _note_first_token(state, request, update, now_s)
    else:
        state.record.step.inter_token_gaps_s.append(now_s - request.last_token_s)
    request.last_token_s = now_s
    if request.state is RequestState.RUNNING:
        request.is_plain = request.add_request.params.logprobs is None
        state.kv.publish(request, len(request.token_ids) - 1, now_s)
    outcome = _outcome(request, token)
    if outcome is None:
        state.record.updates.append(update)
    else:
        end_request(state, request, outcome, now_s, update)


def _note_first_token(state: SchedulerState, request: Request, update: RequestUpdate, now_s: float) -> None:
    request.first_token_s = now_s
    state.record.add(FirstToken(request.request_id, now_s))
    update.cache = request.cache_report
    update.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None


def _outcome(request: Request, token: int) -> Outcome | None:
    """How this token ends the request, if it does. Before min_tokens a stop id is masked on the device and means nothing."""
    if token in request.stop_token_ids and request.num_output_tokens > request.add_request.params.min_tokens:
        is_eos = token in request.add_request.eos_token_ids
        return Outcome(status="completed", finish_reason="stop", stop_reason=None if is_eos else token)
    return REACHED_LENGTH if len(request.token_ids) >= request.max_total_tokens else None


def _collect_prompt_logprobs(step: InFlightStep, result: StepResult) -> None:
    """Put each chunk's dicts at their positions: what is computed again after a preemption lands where it was."""
    for request, row, start in zip(step.requests, step.plan.rows, step.plan.start_positions, strict=True):
        dicts = result.prompt_logprobs.get(row)
        if dicts is not None and request.prompt_logprobs is not None:
            request.prompt_logprobs[start + 1 : start + 1 + len(dicts)] = dicts


def _end_failed_rows(state: SchedulerState, step: InFlightStep, row_errors: dict[int, str], now_s: float) -> None:
    for request, row in zip(step.requests, step.plan.rows, strict=True):
        if row in row_errors and request.state is not RequestState.FINISHED:
            end_request(state, request, failed(_row_error(request, row_errors[row])), now_s)


def _row_error(request: Request, reason: str) -> PagedCoreError:
    """A request whose settings mask every token is wrong itself; anything else is the engine's fault."""
    message = f"Request {request.add_request.group_id!r} cannot go on: {reason}"
    return InvalidRequestError(message) if "masked" in reason else EngineError(message)
