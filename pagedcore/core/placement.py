"""Putting a request's next tokens into the step."""

from __future__ import annotations

from pagedcore.core.events import PrefillChunk
from pagedcore.core.preemption import make_room
from pagedcore.core.request import Request, RequestState
from pagedcore.core.state import SchedulerState
from pagedcore.core.step_builder import StepBuilder


def place_running(state: SchedulerState, step: StepBuilder, now_s: float) -> None:
    """Give every running request its tokens, in order: one each is set aside, what is left of the budget goes to chunks.

    Requests that give way to others come later in the order and are not in the step yet.
    """
    limits = state.limits
    running = state.running.snapshot(limits.max_num_batched_tokens)
    spare = limits.max_num_batched_tokens - len(running)
    step_id = step.step_id
    add_request, add_row, add_start = step.requests.append, step.rows.append, step.start_positions.append
    num_plain = 0
    for request in running:
        start = request.num_computed_tokens
        if start >= request.decode_limit and not _take_next_block(state, step, request, now_s):
            if request.state is RequestState.RUNNING and request.num_known_tokens < request.max_total_tokens and not request.awaits_token:
                place_one(state, step, request, 1 + spare - step.num_extra_tokens, now_s)
            continue
        request.num_computed_tokens = start + 1
        request.num_known_tokens = start + 2
        request.last_step_id = step_id
        add_request(request)
        add_row(request.row)
        add_start(start)
        num_plain += 1
    state.num_live_tokens += num_plain


def _take_next_block(state: SchedulerState, step: StepBuilder, request: Request, now_s: float) -> bool:
    """Give a decode row at the end of its table one more block, if one is available and the row goes on."""
    start = request.num_computed_tokens
    if not 0 < request.decode_limit <= start < request.last_position or not state.kv.pool.num_available_to(request.tenant):
        return False
    step.new_blocks.append((request.row, state.kv.grow(request, start + 1, now_s)))
    request.decode_limit = min(start + state.limits.block_size, request.last_position)
    return True


def place_one(state: SchedulerState, step: StepBuilder, request: Request, max_tokens: int, now_s: float) -> None:
    """Give a running request up to `max_tokens` of its uncomputed tokens, as far as there is room for them."""
    num_blocks = len(request.block_ids)
    num_tokens = make_room(state, request, _wanted_tokens(state, request, max_tokens), now_s)
    if num_tokens:
        place(state, step, request, num_tokens, now_s)
        if len(request.block_ids) > num_blocks:
            step.new_blocks.append((request.row, tuple(request.block_ids[num_blocks:])))
    elif request.state is RequestState.RUNNING:
        step.num_promised_blocks += state.kv.num_missing_blocks(request)


def place(state: SchedulerState, step: StepBuilder, request: Request, max_tokens: int, now_s: float) -> None:
    """Advance a request that has room: grow its table, append its row, publish the blocks that this step fills."""
    kv = state.kv
    start = request.num_computed_tokens
    num_tokens = _wanted_tokens(state, request, max_tokens)
    end = start + num_tokens
    kv.grow(request, end, now_s)
    step.num_promised_blocks += kv.num_missing_blocks(request)
    samples = end == request.num_known_tokens
    step.add_row(request, start, num_tokens, samples=samples)
    request.num_computed_tokens = end
    request.num_known_tokens += samples
    request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, end)
    request.last_step_id = step.step_id
    is_plain_decode = samples and not request.is_constrained
    request.decode_limit = min(len(request.block_ids) * state.limits.block_size, request.last_position) if is_plain_decode else 0
    state.num_live_tokens += num_tokens
    kv.publish(request, min(end, len(request.token_ids)), now_s)
    if start < request.num_prompt_tokens:
        _record_chunk(state, step, request, start, now_s)


def _wanted_tokens(state: SchedulerState, request: Request, max_tokens: int) -> int:
    limit = state.limits.max_chunk_tokens
    return min(request.num_uncomputed_tokens, max_tokens if limit is None else min(limit, max_tokens))


def _record_chunk(state: SchedulerState, step: StepBuilder, request: Request, start: int, now_s: float) -> None:
    num_prompt_tokens = min(request.num_computed_tokens, request.num_prompt_tokens) - start
    step.num_prefill_tokens += num_prompt_tokens
    state.record.add(PrefillChunk(request.request_id, now_s, num_prompt_tokens, step.step_id))
