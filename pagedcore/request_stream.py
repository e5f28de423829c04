"""One open request in the front: updates of its choices go in on one thread, outputs come out on another."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagedcore.errors import EngineClosedError, PagedCoreError
from pagedcore.messages import AbortRequest, FinishRequest, InboxMessage, RequestUpdate
from pagedcore.outputs import CacheReport, CompletionOutput, FinishReason, Logprob, RequestOutput, RequestTimings, Status
from pagedcore.partial_output import ChoiceSoFar
from pagedcore.sampling_params import SamplingParams
from pagedcore.text.output_text import ChoiceText
from pagedcore.text.tokenizer import Tokenizer

WAKE_AGAIN_UPDATES = 64
"""A consumer that does not come is woken again after this many updates, which shows whether its event loop is still open."""

_SEVERITY: tuple[Status, ...] = ("running", "completed", "aborted", "rejected", "error")


class Waker(Protocol):
    """How the thread that consumes streams learns that some have updates."""

    @property
    def key(self) -> object:
        """Wakers of one key wake the same thread, so that one of them is enough."""
        ...

    def wake(self, streams: list[RequestStream]) -> bool:
        """False when nobody is there to wake: the consumer's event loop is closed."""
        ...


@dataclass(frozen=True, slots=True)
class LoopWaker:
    """Wakes the coroutines of one event loop."""

    loop: asyncio.AbstractEventLoop

    @property
    def key(self) -> object:
        return self.loop

    def wake(self, streams: list[RequestStream]) -> bool:
        try:
            self.loop.call_soon_threadsafe(_notify_all, streams)
        except RuntimeError:
            return False
        return True


LOOK_UP_S = 0.5
"""A waiting thread looks up this often: a Ctrl-C that comes just before Python falls asleep in a lock is not seen before it wakes up."""


class QueueWaker:
    """Wakes one blocking thread that consumes any number of streams."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[list[RequestStream]] = queue.SimpleQueue()

    @property
    def key(self) -> object:
        return self

    def wake(self, streams: list[RequestStream]) -> bool:
        self._ready.put(streams)
        return True

    def wait(self) -> list[RequestStream]:
        """Streams with new updates; blocks until there are some."""
        while True:
            try:
                return self._ready.get(timeout=LOOK_UP_S)
            except queue.Empty:
                continue


def _notify_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.notify()


@dataclass(slots=True)
class _Choice:
    """What the front knows of one choice."""

    request_id: str
    so_far: ChoiceSoFar
    text_state: ChoiceText | None
    is_plain: bool
    """Its tokens bring text and nothing else: no stop string is looked for, and nobody asked for log probabilities."""
    matched_stop: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add_plain(self, token_ids: list[int]) -> None:
        """Tokens of a plain choice, none of them its last."""
        self.so_far.add(token_ids, "" if self.text_state is None else self.text_state.push_plain(token_ids))

    def output(self) -> CompletionOutput:
        """The choice as it stands. Marks all of it as seen."""
        return self.so_far.partial() if self.finish_reason is None else self.so_far.last(self.finish_reason, self.stop_reason)


class RequestStream:
    """Owns the partial outputs of one request. `put` is the engine side's, everything else the consumer's."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        text: Tokenizer | None,
        send: Callable[[InboxMessage], None],
        waker: Waker,
        num_choices: int,
    ) -> None:
        self.request_id = request_id
        self.waker = waker
        self.wake_key = waker.key
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._text = text
        self._send = send
        self._updates: deque[RequestUpdate] = deque()
        self._is_signalled = False
        self._ended_ids: set[str] = set()
        self._choices = {choice.request_id: choice for choice in self._make_choices(num_choices)}
        self._num_running = num_choices
        self._status: Status = "running"
        self._worst_status: Status = "completed"
        self._error: PagedCoreError | None = None
        self._cache: CacheReport | None = None
        self._timings: RequestTimings | None = None
        self._delivered_s: float | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_preemptions = 0

    def _make_choices(self, num_choices: int) -> list[_Choice]:
        has_text = self._text is not None and self._params.detokenize
        has_logprobs = self._params.logprobs is not None
        return [
            _Choice(
                request_id=self.request_id if index == 0 else f"{self.request_id}#{index}",
                so_far=ChoiceSoFar(index, has_logprobs=has_logprobs),
                text_state=ChoiceText(self._text, self._params) if has_text else None,
                is_plain=not (has_logprobs or (has_text and self._params.stop)),
            )
            for index in range(num_choices)
        ]

    # ---- engine side

    def put(self, update: RequestUpdate) -> bool:
        """Add an update; True when the consumer has to be woken for it."""
        self._updates.append(update)
        if self._is_signalled and update.finish_reason is None and len(self._updates) % WAKE_AGAIN_UPDATES:
            return False
        self._is_signalled = True
        return True

    def note_end(self, request_id: str) -> None:
        """The engine has ended this choice, or never had it."""
        self._ended_ids.add(request_id)

    # ---- consumer

    @property
    def finished(self) -> bool:
        return self._num_running == 0

    @property
    def request_ids(self) -> list[str]:
        return list(self._choices)

    @property
    def running_request_ids(self) -> list[str]:
        """Choices that the engine has not ended."""
        return [request_id for request_id in self._choices if request_id not in self._ended_ids]

    def abort(self) -> bool:
        """Ask the engine to end what it has not ended; False when there is no engine any more."""
        return all(self._tell(AbortRequest(request_id)) for request_id in self.running_request_ids)

    def wait(self) -> asyncio.Future[None]:
        """Done when there are updates to advance over; for one coroutine, on its running event loop."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if self._has_news:
            self._has_news = False
            waiter.set_result(None)
        return waiter

    def notify(self) -> None:
        """There are updates: whoever waits goes on, or will not wait the next time. On the event loop of the waiting coroutine."""
        if self._waiter is None or self._waiter.done():
            self._has_news = True
        else:
            self._waiter.set_result(None)

    def advance(self) -> RequestOutput | None:
        """Apply all waiting updates; None when they change nothing that a caller would see."""
        return self.output() if self.absorb() else None

    def absorb(self) -> bool:
        """The same without making an output: True when there is something new."""
        self._is_signalled = False
        updates = self._updates
        if len(updates) == 1:
            return self._apply(updates.popleft())
        changed = False
        for update in self._take_updates():
            changed = self._apply(update) or changed
        return changed

    def _take_updates(self) -> list[RequestUpdate]:
        """Those that wait. A consumer who is late gets the tokens of several steps in one: their text is cheaper to make together."""
        taken: list[RequestUpdate] = []
        joined: RequestUpdate | None = None
        while self._updates:
            update = self._updates.popleft()
            if not update.has_tokens_only:
                joined = None
                taken.append(update)
            elif joined is not None and joined.request_id == update.request_id:
                joined.new_token_ids += update.new_token_ids
            else:
                joined = RequestUpdate(update.request_id, list(update.new_token_ids))
                taken.append(joined)
        return taken

    def output(self) -> RequestOutput:
        """The request as it stands."""
        return RequestOutput(  # by position: it is made for every token
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            [choice.output() for choice in self._choices.values()],
            self._num_running == 0,
            self._status,
            self._prompt_logprobs,
            self._cache,
            self._error,
            self._timings,
            self._num_preemptions,
            self._delivered_s,
        )

    def _apply(self, update: RequestUpdate) -> bool:
        choice = self._choices[update.request_id]
        if choice.finish_reason is not None:
            return False
        if choice.is_plain and update.has_tokens_only:
            choice.add_plain(update.new_token_ids)
            return bool(update.new_token_ids)
        self._take_request_facts(update, choice)
        changed = self._take_tokens(choice, update) if choice.matched_stop is None else False
        if update.finish_reason is None:
            return changed
        self._finish(choice, update)
        return True

    def _take_request_facts(self, update: RequestUpdate, choice: _Choice) -> None:
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = self._with_text_prompt(update.prompt_logprobs)
        if update.cache is not None and choice.so_far.index == 0:
            self._cache = update.cache
        if update.timings is not None:
            self._timings = update.timings if self._timings is None else _merged(self._timings, update.timings)

    def _take_tokens(self, choice: _Choice, update: RequestUpdate) -> bool:
        """Add new tokens and their text, up to the end of a stop string if one is complete."""
        new_ids, so_far = update.new_token_ids, choice.so_far
        if not new_ids and update.finish_reason is None:
            return False
        kept, new_text = len(new_ids), ""
        if choice.text_state is not None:
            ids_with_text = new_ids if update.finish_reason is None else self._ids_with_text(update)
            new_text, choice.matched_stop, num_kept = choice.text_state.push(ids_with_text, finished=update.finish_reason is not None)
            if choice.matched_stop is not None:
                kept = num_kept - len(so_far.token_ids)
        so_far.add(new_ids[:kept], new_text)
        self._take_logprobs(so_far, update, kept)
        if choice.matched_stop is not None and update.finish_reason is None:
            self._tell(FinishRequest(choice.request_id, len(so_far.token_ids), choice.matched_stop))
        return True

    def _ids_with_text(self, update: RequestUpdate) -> list[int]:
        """The token that ended the output has no text of its own, unless the caller keeps stop strings."""
        ends_with_stop_id = update.finish_reason == "stop" and not isinstance(update.stop_reason, str)
        if ends_with_stop_id and update.new_token_ids and not self._params.include_stop_str_in_output:
            return update.new_token_ids[:-1]
        return update.new_token_ids

    def _take_logprobs(self, so_far: ChoiceSoFar, update: RequestUpdate, kept: int) -> None:
        if so_far.logprobs is None or update.new_logprobs is None:
            return
        for token_id, entry in zip(update.new_token_ids[:kept], update.new_logprobs[:kept], strict=True):
            so_far.logprobs.append(self._with_text(entry))
            so_far.cumulative_logprob = (so_far.cumulative_logprob or 0.0) + entry[token_id].logprob

    def _finish(self, choice: _Choice, update: RequestUpdate) -> None:
        stopped = choice.matched_stop is not None  # then its text is whole, whatever became of it later
        choice.finish_reason = "stop" if stopped else update.finish_reason
        choice.stop_reason = choice.matched_stop if stopped else update.stop_reason
        self._num_running -= 1
        if self.finished:
            self._delivered_s = time.monotonic()
        self._num_preemptions += update.num_preemptions
        self._take_status(update, stopped)

    def _take_status(self, update: RequestUpdate, stopped: bool) -> None:
        """The request's status is its worst choice's; a refused or failed choice ends the others."""
        status: Status = "completed" if stopped else update.status
        self._worst_status = max(self._worst_status, status, key=_SEVERITY.index)
        if self.finished or self._worst_status != "completed":
            self._status = self._worst_status
        if update.error is not None and self._error is None and not stopped:
            self._error = update.error
            self.abort()

    def _tell(self, message: InboxMessage) -> bool:
        """False when there is no engine any more; it has ended every request itself."""
        try:
            self._send(message)
        except EngineClosedError:
            return False
        return True

    def _with_text(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        text = self._text
        if text is None:
            return entry
        return {token_id: Logprob(p.logprob, p.rank, text.token_text(token_id)) for token_id, p in entry.items()}

    def _with_text_prompt(self, entries: list[dict[int, Logprob] | None]) -> list[dict[int, Logprob] | None]:
        return [None if entry is None else self._with_text(entry) for entry in entries]


def _merged(one: RequestTimings, other: RequestTimings) -> RequestTimings:
    """Two choices of one request: the first of each beginning, the last end."""
    return RequestTimings(
        one.arrival_s,
        _earlier(one.admitted_s, other.admitted_s),
        _earlier(one.first_token_s, other.first_token_s),
        max(one.finished_s or 0.0, other.finished_s or 0.0),
        _earlier(one.queued_s, other.queued_s),
    )


def _earlier(one: float | None, other: float | None) -> float | None:
    return min((time_s for time_s in (one, other) if time_s is not None), default=None)
