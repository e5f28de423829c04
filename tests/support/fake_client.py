"""A small typed engine for tests of everything in front of one: scripted tokens, gates instead of delays, errors on demand.

Its tokens are the bytes of UTF-8 (id = byte), with `BOS` and `EOS` as the only special ones, so that texts, ids, offsets and
characters split over tokens can be worked out by hand.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedcore.client import ModelInfo, RequestContext
from pagedcore.errors import InvalidRequestError, PagedCoreError, id_in_use
from pagedcore.outputs import CacheReport, CompletionOutput, FinishReason, Logprob, RequestOutput
from pagedcore.sampling_params import SamplingParams

BOS, EOS = 256, 257
VOCAB_SIZE = 258
WAIT_S = 60.0
"""Longest wait for an event that should come; a test that reaches it fails."""


class Gate:
    """Opened once, from any thread; coroutines of any event loop wait for it."""

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        with self._lock:
            self._open = True
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    async def wait(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._open:
                return
            self._waiters.append((asyncio.get_running_loop(), event))
        await asyncio.wait_for(event.wait(), WAIT_S)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the fake engine does with one request."""

    pieces: Sequence[str | bytes] = ("Hello", " world")
    """What each step generates; a bytes piece may end inside a character, whose text then comes with the rest of it."""
    choices: Sequence[Sequence[str | bytes]] | None = None
    """Pieces of each choice where n choices differ; they finish when their own pieces end."""
    num_cached_tokens: int = 0
    sampled_rank: int = 1
    """Rank of each sampled token among all; the likelier ones are other ids."""
    error: PagedCoreError | None = None
    error_step: int = 0
    """The step that fails with `error`: 0 is before the first output."""
    raises: bool = False
    """Raise `error` from generate instead of giving it as a last output."""
    gates: Mapping[int, Gate] = field(default_factory=dict)
    """Step -> gate that it waits for."""

    def pieces_of(self, index: int) -> list[bytes]:
        pieces = self.pieces if self.choices is None else self.choices[index % len(self.choices)]
        return [piece.encode() if isinstance(piece, str) else piece for piece in pieces]


@dataclass(frozen=True, kw_only=True)
class SeenRequest:
    """One call of `generate`."""

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    context: RequestContext


class FakeText:
    """Bytes as tokens. `encode_gate`, if set, blocks each encode of more than `gated_chars` characters, as a slow tokenizer would."""

    def __init__(self) -> None:
        self.encode_gate: threading.Event | None = None
        self.encode_started = threading.Event()
        self.gated_chars = 1000
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.template = "{{ messages }}"

    def encode(self, text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None) -> list[int]:
        if self.encode_gate is not None and len(text) > self.gated_chars:
            self.encode_started.set()
            assert self.encode_gate.wait(WAIT_S), "nobody opened the encode gate"
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [token_id for token_id in token_ids if token_id < BOS or not skip_special_tokens]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        self.chats.append((list(messages), template_kwargs))
        if any(message["content"] == "refuse me" for message in messages):
            raise InvalidRequestError("The chat template refused the messages.", param="messages")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + ("<assistant>" if template_kwargs.get("add_generation_prompt", True) else "")

    def chat_template(self, *, with_tools: bool) -> str | None:
        return self.template

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id) or bytes([token_id])


class FakeClient:
    """An `EngineClient`. Requests take the `scripts` in turn, the last one again and again.

    `seen` holds every request, `aborted` the ids of those left or aborted before their end.
    """

    def __init__(self, *scripts: Script, model_names: tuple[str, ...] = ("fake-model",), max_model_len: int = 4096) -> None:
        self.info = ModelInfo(
            model_names=model_names,
            max_model_len=max_model_len,
            created_s=1_700_000_000,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        self.fake_text = FakeText()
        self.text: FakeText | None = self.fake_text
        self.scripts = list(scripts) or [Script()]
        self.seen: list[SeenRequest] = []
        self.aborted: list[str] = []
        self.answers: dict[str, list[dict[str, Any]] | PagedCoreError] = {}
        """Question of an operator -> what each engine answers, or the error; nothing where it is not named."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ready = True
        self.alive = True
        self._open: dict[str, asyncio.Event] = {}
        self._changed = threading.Condition()

    # ---- the contract

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        token_ids = self.fake_text.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else list(prompt)
        request_id = request_id or f"fake-{len(self.seen)}"
        if request_id in self._open:
            raise id_in_use(request_id)
        with self._changed:
            script = self.scripts[min(len(self.seen), len(self.scripts) - 1)]
            self.seen.append(
                SeenRequest(prompt_token_ids=token_ids, params=params, request_id=request_id, context=context or RequestContext())
            )
            self._open[request_id] = asyncio.Event()
            self._changed.notify_all()
        run = _Run(script, request_id, prompt if isinstance(prompt, str) else None, token_ids, params)
        try:
            while not run.finished:
                yield await run.step(self._open[request_id])
        finally:
            self._end(request_id, was_aborted=not run.finished or run.was_aborted)

    async def abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._open[request_id].set()

    async def is_ready(self) -> bool:
        return self.ready

    async def is_alive(self) -> bool:
        return self.alive

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        return b"pagedcore_fake 1.0\n", "text/plain; version=0.0.4; charset=utf-8"

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        self.asked.append((question, arguments))
        answer = self.answers.get(question, [{}])
        if isinstance(answer, PagedCoreError):
            raise answer
        return answer

    # ---- for tests

    @property
    def num_open(self) -> int:
        return len(self._open)

    def wait_for_abort(self, request_id: str) -> None:
        """Block until that request was aborted; fails after a while."""
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.aborted, WAIT_S), f"{request_id} was not aborted; {self.aborted} were"

    def wait_for_request(self, number: int = 1) -> None:
        """Block until so many requests have come; fails after a while."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= number, WAIT_S), f"{len(self.seen)} requests came"

    def _end(self, request_id: str, *, was_aborted: bool) -> None:
        with self._changed:
            del self._open[request_id]
            if was_aborted:
                self.aborted.append(request_id)
            self._changed.notify_all()


class _Run:
    """The steps of one request."""

    def __init__(self, script: Script, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._script = script
        self._params = params
        self._step = 0
        self._choices = [_FakeChoice(index, script, params) for index in range(params.n)]
        num_prompt = len(prompt_token_ids)
        cache = CacheReport(num_prompt, pool_tokens=script.num_cached_tokens, computed_tokens=num_prompt - script.num_cached_tokens)
        self._head: dict[str, Any] = {"request_id": request_id, "prompt": prompt, "prompt_token_ids": prompt_token_ids, "cache": cache}
        if params.prompt_logprobs is not None:
            entries = [_fake_logprobs(token_id, params.prompt_logprobs, script.sampled_rank) for token_id in prompt_token_ids[1:]]
            self._head["prompt_logprobs"] = [None, *entries]
        self.was_aborted = False

    @property
    def finished(self) -> bool:
        return all(choice.output.finished for choice in self._choices)

    async def step(self, abort: asyncio.Event) -> RequestOutput:
        gate = self._script.gates.get(self._step)
        if gate is not None:
            await _first_of(gate.wait(), abort.wait())
        if abort.is_set():
            return self._end("abort", None)
        error = self._script.error
        if error is not None and self._script.error_step == self._step:
            if self._script.raises:
                raise error
            return self._end("error", error)
        for choice in self._choices:
            choice.step(self._step)
        self._step += 1
        return self._output("completed" if self.finished else "running", None)

    def _end(self, reason: FinishReason, error: PagedCoreError | None) -> RequestOutput:
        for choice in self._choices:
            choice.end(reason)
        self.was_aborted = reason == "abort"
        return self._output("error" if error else "aborted", error)

    def _output(self, status: Any, error: PagedCoreError | None) -> RequestOutput:
        outputs = [choice.snapshot() for choice in self._choices]
        return RequestOutput(**self._head, outputs=outputs, finished=self.finished, status=status, error=error)


class _FakeChoice:
    """One choice: its pieces, cut at max_tokens and at the first stop string."""

    def __init__(self, index: int, script: Script, params: SamplingParams) -> None:
        self._params = params
        self._rank = script.sampled_rank
        self.output = CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])
        self._pieces = script.pieces_of(index)
        whole = b"".join(self._pieces).decode(errors="replace")
        stops = [(position, stop) for stop in params.stop if (position := whole.find(stop)) >= 0]
        self._stop_at: int | None = None
        self._stop: str | None = None
        if stops:
            self._stop_at, self._stop = min(stops)

    def step(self, number: int) -> None:
        output = self.output
        output.new_text, output.new_token_ids = "", []
        if output.finished:
            return
        for token_id in self._pieces[number] if number < len(self._pieces) else b"":
            self._take(token_id)
            if output.finished:
                return
        if number + 1 >= len(self._pieces):
            self.end("stop")

    def end(self, reason: FinishReason) -> None:
        if not self.output.finished:
            self.output.finish_reason = reason

    def snapshot(self) -> CompletionOutput:
        output = self.output
        return CompletionOutput(
            index=output.index,
            text=output.text,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            new_text=output.new_text,
            new_token_ids=list(output.new_token_ids),
        )

    def _take(self, token_id: int) -> None:
        output, params = self.output, self._params
        output.token_ids.append(token_id)
        output.new_token_ids.append(token_id)
        if output.logprobs is not None and params.logprobs is not None:
            output.logprobs.append(_fake_logprobs(token_id, params.logprobs, self._rank))
        decoded = _complete_text(bytes(output.token_ids))
        text = decoded if self._stop_at is None else decoded[: self._stop_at]
        output.new_text += text[len(output.text) :]
        output.text = text
        if self._stop is not None and self._stop_at is not None and len(decoded) >= self._stop_at + len(self._stop):
            output.finish_reason, output.stop_reason = "stop", self._stop
        elif params.max_tokens is not None and len(output.token_ids) >= params.max_tokens:
            output.finish_reason = "length"


def _complete_text(raw: bytes) -> str:
    """The text of the bytes, without a character that has only begun."""
    for cut in range(min(4, len(raw) + 1)):
        try:
            return raw[: len(raw) - cut].decode()
        except UnicodeDecodeError:
            continue
    return raw.decode(errors="replace")


def _fake_logprobs(token_id: int, num_top: int, rank: int) -> dict[int, Logprob]:
    """Rank r has logprob -r / 4; the other ranks go to the ids after the token's own."""
    others = ((token_id + 1 + offset) % BOS for offset in range(num_top + 1))
    entry = {next(others): Logprob(-r / 4, r) for r in range(1, num_top + 1) if r != rank}
    return {**entry, token_id: Logprob(-rank / 4, rank)}


async def _first_of(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
