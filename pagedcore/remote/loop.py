"""What stands in a front's process where the engine loop would, when that runs in another one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from pagedcore.core.events import Finished
from pagedcore.core.request_limits import check_size
from pagedcore.engine_build import scheduler_limits
from pagedcore.errors import EngineClosedError, EngineError, InvalidRequestError, PagedCoreError, id_in_use
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, InboxMessage, failed_update
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outboxes import Outbox
from pagedcore.process_endings import belong_to_process
from pagedcore.remote.faults import engine_error_of
from pagedcore.remote.frames import Abort, Finish, Gather, Numbers, Refusal, Updates, Welcome
from pagedcore.remote.link import Link, LinkSource
from pagedcore.remote.long_prompts import UnpackedAdd, encoded
from pagedcore.remote.numbers import Mirror
from pagedcore.remote.open_requests import OpenRequest, OpenRequests
from pagedcore.remote.questions import RemoteAdvisor, RemoteInspector, RemoteTracer
from pagedcore.traffic import Door

FLUSH_TIMEOUT_S = 2.0

CLOSE_TIMEOUT_S = 30.0

LOSS_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class RemoteLoop:
    """Owns the link to an engine, one after another, and the open requests of this front.

    Does what `EngineLoop` does for a front. When the link is lost, all requests end with an error, and new ones are refused
    until there is a link again; `is_alive` until the source gives up. A forked child has no link: every call is refused there.
    """

    grammars = None
    """They are the engine's; a front checks with its own."""

    def __init__(self, source: LinkSource) -> None:
        """Raises what opening the first link raises."""
        self._source = source
        self._requests = OpenRequests()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._gone: str | None = None
        """Why every call is refused for good."""
        self._link: Link | None = source.open()
        self._away = ""
        """Why no request is taken at the moment."""
        welcome = self._link.welcome
        self._model = _model_of(welcome)
        self.info = welcome.info
        self.plan = replace(welcome.plan, config=welcome.plan.config.replace(isolation="process")) if source.is_owner else welcome.plan
        self._limits = scheduler_limits(welcome.plan)
        self._mirror = Mirror(welcome, self.flush_metrics) if source.is_owner else None
        self._door = Door(is_counting=True)
        """Where this front has the numbers it decides what counts."""
        self._lost: list[OpenRequest] = []
        """What engines of others took with them: the next one counts it."""
        self.tracer, self.advisor, self.inspector = RemoteTracer(self.ask), RemoteAdvisor(self.ask), RemoteInspector(self.ask)
        self._thread = threading.Thread(target=self._run, args=(self._link,), name="pagedcore-link", daemon=True)
        belong_to_process(self)

    # ---- any thread

    def start(self) -> None:
        """Begin to listen. Raises `EngineClosedError` after `close`."""
        self.raise_if_closed()
        self._thread.start()
        self._tell_label()

    def submit(self, message: InboxMessage, outbox: Outbox | None = None) -> None:
        """See `EngineLoop.submit`. Raises `EngineClosedError` also while there is no link."""
        if isinstance(message, AddRequest):
            assert outbox is not None, "an AddRequest needs an outbox"
            self._add(message, outbox)
            return
        self.raise_if_closed()
        link = self._link
        if link is None or not self._requests.is_of(message.request_id, outbox):
            return  # it has just ended, or the id is another front's
        if isinstance(message, FinishRequest):
            link.send(Finish(message.request_id, message.num_tokens, message.stop_reason))
        else:
            assert isinstance(message, AbortRequest)
            link.send(Abort(message.request_id))

    def _add(self, request: AddRequest, outbox: Outbox) -> None:
        with self._lock:
            link = self._linked()
            self.raise_if_away()
            if self._mirror is not None:
                request = replace(request, is_traffic=self._door.admits(request))
            frame = _encoded(request)
            opened = self._requests.open(request, outbox)
            if opened is not None:
                if self._mirror is not None:
                    self._mirror.open(opened)
                link.send_encoded(frame)
        if opened is None:
            outbox([failed_update(request.request_id, id_in_use(request.request_id), "rejected")])

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """See `EngineLoop.gathering`."""
        link = self._linked()
        link.send(Gather(is_open=True))
        try:
            yield
        finally:
            link.send(Gather(is_open=False))

    def ask(self, name: str, kind: Any = Any, **arguments: Any) -> Any:
        """What a function of the engine returns; see `Link.call`. Raises `EngineClosedError` while there is no link."""
        return self._linked().call(name, kind, **arguments)

    @property
    def is_alive(self) -> bool:
        """Not closed and not given up; it may be starting again at the moment."""
        return self._gone is None

    @property
    def is_linked(self) -> bool:
        """An engine is there and takes requests."""
        return self._gone is None and self._link is not None and not self._away

    @property
    def writes_numbers(self) -> bool:
        """Whether the engine's numbers are in this process' registry; else they are in its own."""
        return self._mirror is not None

    def stats(self) -> StatsSnapshot:
        snapshot: StatsSnapshot = self.ask("stats", StatsSnapshot)
        return snapshot

    def flush_metrics(self) -> None:
        """Bring the registry up to date, as far as the engine answers."""
        with suppress(EngineError):
            self.ask("flush_metrics", timeout_s=FLUSH_TIMEOUT_S)

    def metrics_text(self, accept: str) -> tuple[bytes, str]:
        """The exposition: of this process where it holds the engine's numbers, else the engine's own."""
        if self._mirror is None:
            text: tuple[bytes, str] = self.ask("metrics", tuple[bytes, str], accept=accept)
            return text
        from pagedcore.observe.exposition import metrics_text

        return metrics_text(accept=accept)

    def count_lost(self, ends: Sequence[Finished]) -> None:
        """Requests that were to come here and never did: counted where the engine's numbers are."""
        if self._mirror is not None:
            self._mirror.count_lost(ends)

    def check(self) -> None:
        """See `EngineLoop.check`."""
        self.ask("check")

    def reset_prefix_cache(self) -> bool:
        """See `EngineLoop.reset_prefix_cache`."""
        return bool(self.ask("reset_prefix_cache"))

    def check_request(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise what adding such a request would raise for its size; asks nobody."""
        check_size(self._limits, num_prompt_tokens, max_tokens)

    def pause_recording(self) -> None:
        """See `EngineLoop.pause_recording`. Raises `EngineError` for an engine that others use too."""
        if not self._source.is_owner:
            raise EngineError("This engine is shared by several processes; compute its warm-up prompts where it is started.")
        was_counting, self._door.is_counting = self._door.is_counting, False
        try:
            self.ask("pause_recording")
        except BaseException:
            self._door.is_counting = was_counting
            if was_counting:
                with suppress(PagedCoreError):  # it may have paused, and its answer was lost
                    self.ask("start_recording", timeout_s=FLUSH_TIMEOUT_S)
            raise

    def start_recording(self) -> None:
        """See `EngineLoop.start_recording`. Requests that come from now on count, whatever the engine answers."""
        try:
            self.ask("start_recording")
        finally:
            self._door.is_counting = True

    def raise_if_closed(self) -> None:
        """Raise `EngineClosedError` when this is closed or has given up."""
        if self._gone is not None:
            raise EngineClosedError(self._gone)

    def raise_if_away(self) -> None:
        """Raise `EngineClosedError` while no engine takes requests."""
        if not self.is_linked:
            raise EngineClosedError(self._gone or self._away)

    def join(self, timeout_s: float) -> None:
        """Wait for the link to end by itself."""
        self._thread.join(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """End all requests of this front as aborted, and the engine where it is this front's. May be called twice."""
        with self._lock:
            self._gone = self._gone or "The engine is closed and takes no more requests; start a new engine."
            if self._stop.is_set():
                return
            self._stop.set()
            link = self._link
        deadline_s = time.monotonic() + timeout_s
        if link is not None and self._thread.ident is None:
            link.lose(EngineClosedError(self._gone))
        elif link is not None:
            link.finish()
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout_s)
        self._source.close(max(1.0, deadline_s - time.monotonic()) if link is not None else 0.0)
        if link is not None and self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(LOSS_TIMEOUT_S)  # what a child that had to be killed took with it is counted
        if self._mirror is not None:
            self._mirror.close()

    def disown(self) -> None:
        """In a forked child: refuse everything, and leave the parent's link alone."""
        self._gone = "The engine belongs to the process that this one was forked from; connect here, or fork before."
        self._stop.set()
        self._lock = threading.Lock()  # another thread may have held it
        if self._link is not None:
            os.close(self._link.detach())

    def _linked(self) -> Link:
        self.raise_if_closed()
        link = self._link
        if link is None:
            raise EngineClosedError(self._away)
        return link

    def _introduce(self) -> None:
        """Tell a new engine what it is called here, and what the one before it had not counted."""
        self._tell_label()
        lost, self._lost = self._lost, []
        if lost:
            try:
                self.ask("count_lost", requests=[one.request for one in lost], num_tokens=[one.num_tokens for one in lost])
            except EngineError:
                self._lost += lost  # it has died, too

    def _tell_label(self) -> None:
        if self._mirror is not None and self._mirror.engine != self.plan.config.metrics_instance:
            with suppress(EngineError):
                self.ask("name_engine", label=self._mirror.engine)

    # ---- the link's thread

    def _run(self, link: Link | None) -> None:
        try:
            while link is not None:
                for frame in link.frames():
                    self._take(frame)
                link = self._recover(link)
        finally:  # whatever went wrong here: nobody is left waiting
            self._gone = self._gone or "The link to the engine failed; see the log, and connect anew."
            self._requests.fail_all(EngineClosedError(self._gone))
            if link is not None:
                link.lose(EngineClosedError(self._gone))
            if self._mirror is not None:
                self._mirror.lose()

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Updates):
            for request_id in self._requests.deliver(frame.items):
                if (link := self._link) is not None:
                    link.send(Abort(request_id))
        elif isinstance(frame, Numbers):
            if self._mirror is not None:
                self._mirror.take(frame)
        elif isinstance(frame, Refusal):
            self._away = str(engine_error_of(frame.fault))

    def _recover(self, link: Link) -> Link | None:
        """The link has ended: tell everybody, and get another one unless that was meant."""
        link.abort()  # the other side may still wait for what we say
        with self._lock:
            self._link, self._away = None, "The connection to the engine was lost; it is being restored."
        if self._mirror is not None:
            self._mirror.lose()
        self._door.is_counting = True  # the next one counts from its start
        reason = "The engine was closed." if self._stop.is_set() else self._source.explain_loss()
        self._away = f"{reason} {self._source.outlook}"
        lost = self._requests.fail_all(EngineClosedError(f"{reason} This request ran there; send it again."))
        link.lose(EngineClosedError(reason))
        if self._stop.is_set():
            return None
        logger.error("%s", reason)
        try:
            return self._welcomed(self._source.reopen(self._stop), link.welcome.pid, lost)
        except PagedCoreError as error:
            logger.critical("%s", error)
            self._gone = str(error)
            return None

    def _welcomed(self, link: Link | None, last_pid: int, lost: list[OpenRequest]) -> Link | None:
        if link is None:
            return None
        if _model_of(link.welcome) != self._model:
            link.lose(EngineClosedError(""))
            raise EngineClosedError(f"The engine there now serves {link.welcome.plan.model_name}, another model than before; connect anew.")
        with self._lock:
            is_wanted = not self._stop.is_set()
            if is_wanted:
                self._link, self._away = link, ""
        if not is_wanted:  # closed meanwhile
            link.lose(EngineClosedError("The engine was closed."))
            self._source.close(CLOSE_TIMEOUT_S)
            return None
        logger.warning("The engine is there again, process %d.", link.welcome.pid)
        if self._mirror is None and link.welcome.pid != last_pid:  # the same one has ended them itself
            self._lost += lost
        threading.Thread(target=self._introduce, name="pagedcore-introduce", daemon=True).start()
        return link


def _encoded(request: AddRequest) -> bytes | UnpackedAdd:
    """Raises `InvalidRequestError` for what no message holds: integers beyond 64 bits, text that is not Unicode."""
    try:
        return encoded(request)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise InvalidRequestError(f"The request cannot be sent to the engine's process: {error}.") from error


def _model_of(welcome: Welcome) -> tuple[object, ...]:
    plan = welcome.plan
    return plan.model_dir, plan.tokenizer_dir, plan.served_model_names, plan.vocab_size, plan.max_model_len, plan.eos_token_ids
