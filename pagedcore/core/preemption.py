"""Room for a running request: its own growth, and the requests that give way to it."""

from __future__ import annotations

from pagedcore.core.events import Preempted
from pagedcore.core.request import Request, RequestState
from pagedcore.core.state import SchedulerState


def make_room(state: SchedulerState, request: Request, num_tokens: int, now_s: float) -> int:
    """Tokens, at most `num_tokens`, for which the request has or can get blocks, preempting later requests if it has none.

    0: it was preempted itself, or it stalls until blocks in flight come back.
    """
    kv = state.kv
    while (num_fitting := kv.num_fitting_tokens(request)) <= 0:
        if kv.has_deferred_frees:
            state.record.num_stalls += 1
            return 0
        victim = _latest_victim(state, request)
        preempt(state, victim, now_s)
        if victim is request:
            return 0
    return min(num_tokens, num_fitting)


def preempt(state: SchedulerState, request: Request, now_s: float) -> None:
    """Send a running request back to its place in the waiting queue; what it had computed is computed again unless the cache keeps it,
    on the device or in host memory."""
    pool = state.kv.pool
    usage_before = pool.num_active_blocks / pool.num_blocks
    request.num_lost_tokens = request.num_computed_tokens
    request.num_preemptions += 1
    request.num_bypasses = 0
    state.kv.host.watch(request.request_id, request.block_hashes[: request.num_published_blocks])
    state.leave_running(request, now_s)
    request.state = RequestState.WAITING
    state.waiting.add(request)
    usage_after = pool.num_active_blocks / pool.num_blocks
    state.record.add(Preempted(request.request_id, now_s, request.num_lost_tokens, usage_before, usage_after))


def _latest_victim(state: SchedulerState, needy: Request) -> Request:
    """The last running request in the order of service that is not protected. The one that needs room is never protected.

    Of its own tenant where that has its share of the pool: what others would give back is cached for them, and kept from it.
    """
    is_own = state.kv.pool.is_share_used_up(needy.tenant)
    return next(each for each in reversed(state.running) if not each.is_protected and (each.tenant == needy.tenant or not is_own))
