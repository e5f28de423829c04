"""What the books of an engine still lack when it goes: requests that could not end in order are counted here, each once."""

from __future__ import annotations

from collections.abc import Iterable

from pagedcore.core.events import Arrived, Event, Finished, StepEvents
from pagedcore.messages import AddRequest
from pagedcore.observe.recorder import Recorder


def last_events(recorder: Recorder, unrecorded: Iterable[AddRequest], refused: Iterable[Finished], now_s: float) -> StepEvents | None:
    """An end by an error for each request that is open in the books, and for those that are in no book yet, of which `refused` have an
    end of their own. None where there is none.

    How far the prompts were computed nobody knows any more: what the cache did not serve counts as abandoned.
    """
    events: list[Event] = []
    known = recorder.open_requests()
    for request in known:
        report = recorder.cache_report(request.request_id)
        events.append(_end(request, now_s, num_served=0 if report is None else report.num_cached_tokens))
    known_ids = {id(request) for request in known}
    for request in unrecorded:
        if id(request) not in known_ids and request.is_traffic is not False:
            events += [Arrived(request, now_s), _end(request, now_s)]
    for end in refused:
        if end.request.is_traffic is not False:
            events += [Arrived(end.request, end.now_s), end]
    return StepEvents(now_s=now_s, events=events) if events else None


def _end(request: AddRequest, now_s: float, num_served: int = 0) -> Finished:
    return Finished(request, now_s, "error", "error", num_abandoned_prompt_tokens=len(request.prompt_token_ids) - num_served)
