"""The front of an engine, in whatever process it runs: prompts become messages, updates become outputs.

Everything that needs text happens here, off the engine thread: tokenizing, unfolding n, detokenizing, stop strings.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pagedcore.client import ModelInfo, RequestContext
from pagedcore.errors import EngineClosedError, InvalidRequestError
from pagedcore.messages import AbortRequest, AddRequest, InboxMessage, RequestUpdate
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import LoopWaker, QueueWaker, RequestStream, Waker
from pagedcore.sampling_params import SamplingParams
from pagedcore.text.bad_words import encode_bad_words
from pagedcore.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

INLINE_PROMPT_CHARS = 4096
"""Longer prompts are tokenized in a worker thread, so that an event loop never stalls."""

Send = Callable[[InboxMessage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; `text` is None when the caller gave token ids."""

    text: str | None
    token_ids: list[int]


class Front:
    """Owns the open streams of one engine. `deliver` may be called from any thread, `generate` from any event loop."""

    def __init__(self, info: ModelInfo, text: Tokenizer | None, send: Send) -> None:
        self.info = info
        self.text = text
        self._send = send
        self._streams: dict[str, RequestStream] = {}  # by request id of each choice
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._seeds = random.Random(info.seed)
        self._draining = False

    # ---- callers

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request; see `EngineClient.generate`."""
        arrival_s = time.monotonic()
        tokenized = await self._tokenize_async(prompt, add_special_tokens)
        waker = LoopWaker(asyncio.get_running_loop())
        stream = self.open(tokenized, params, request_id, context=context, arrival_s=arrival_s, waker=waker)
        try:
            while not stream.finished:
                await stream.wait()
                output = stream.advance()
                if output is not None:
                    yield output
        finally:
            self.close_stream(stream)

    def generate_sync(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """The same for a plain thread: a blocking iterator that aborts the request when it is closed early."""
        waker = QueueWaker()
        tokenized = self.tokenize(prompt, add_special_tokens)
        stream = self.open(tokenized, params, request_id, context=context, arrival_s=time.monotonic(), waker=waker)
        try:
            while not stream.finished:
                for ready in waker.wait():
                    output = ready.advance()
                    if output is not None:
                        yield output
        finally:
            self.close_stream(stream)

    def tokenize(self, prompt: Prompt, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Token ids of a prompt in any of its forms. Raises `InvalidRequestError` for what is not one."""
        if isinstance(prompt, Mapping):
            prompt = _prompt_of_mapping(prompt)
        if isinstance(prompt, str):
            if self.text is None:
                raise InvalidRequestError("The engine has no tokenizer (skip_tokenizer_init=True); give token ids.", param="prompt")
            return TokenizedPrompt(text=prompt, token_ids=self.text.encode(prompt, add_special_tokens=add_special_tokens))
        return TokenizedPrompt(text=None, token_ids=self._checked_ids(prompt))

    def open(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request_id: str | None,
        *,
        context: RequestContext | None,
        arrival_s: float,
        waker: Waker,
    ) -> RequestStream:
        """Send one request to the engine, n choices of it. Raises `EngineClosedError`, or `InvalidRequestError` for the
        parameters and for an id that is in use."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be a SamplingParams, got {type(params).__name__}.", param="params")
        self._check_token_parameters(params)
        group_id = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        messages = self._messages(group_id, prompt, params, context or RequestContext(), arrival_s)
        stream = RequestStream(group_id, prompt.text, prompt.token_ids, params, self.text, self._send, waker, len(messages))
        self._register(stream, messages)
        return stream

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a stream; what of it still runs is aborted."""
        self._forget(stream)
        for request_id in stream.unfinished_request_ids():
            try:
                self._send(AbortRequest(request_id))
            except EngineClosedError:
                return  # nothing runs any more

    async def abort(self, request_id: str) -> None:
        """Abort all choices of a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        self.abort_sync(request_id)

    def abort_sync(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            for choice_id in stream.unfinished_request_ids():
                self._send(AbortRequest(choice_id))

    # ---- the engine's side

    def deliver(self, updates: list[RequestUpdate]) -> None:
        """Take one step's updates: each stream gets its own, each waiting thread or loop is woken once."""
        woken: dict[Waker, list[RequestStream]] = {}
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue  # its caller has left
            if stream.put(update):
                woken.setdefault(stream.waker, []).append(stream)
        for waker, streams in woken.items():
            if not waker.wake(streams):
                for stream in streams:
                    self.close_stream(stream)

    def fail_all(self, error: Exception, *, status: str = "error") -> None:
        """The engine is gone: every open stream ends with this error."""
        reason = "abort" if status == "aborted" else "error"
        self.deliver(
            [
                RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason=reason, status=status, error=error)  # type: ignore[arg-type]
                for request_id in list(self._streams)
            ]
        )

    # ---- draining

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def is_draining(self) -> bool:
        return self._draining

    def begin_drain(self) -> None:
        """Take no more requests; the open ones go on."""
        self._draining = True

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait until the open ones have ended; False when time ran out first."""
        self.begin_drain()
        with self._idle:
            return self._idle.wait_for(lambda: not self._streams, timeout=timeout_s)

    # ---- inside

    async def _tokenize_async(self, prompt: Prompt, add_special_tokens: bool) -> TokenizedPrompt:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > INLINE_PROMPT_CHARS:
            return await asyncio.to_thread(self.tokenize, prompt, add_special_tokens)
        return self.tokenize(prompt, add_special_tokens)

    def _checked_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence) or not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            raise InvalidRequestError(f"A prompt must be text or token ids, got {type(prompt).__name__}.", param="prompt")
        token_ids = list(prompt)
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.info.vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < self.info.vocab_size)
            raise InvalidRequestError(f"Token id {wrong} is outside the vocabulary of {self.info.vocab_size} tokens.", param="prompt")
        return token_ids

    def _check_token_parameters(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= self.info.vocab_size:
                    message = f"{name} holds token id {token_id}; the vocabulary has {self.info.vocab_size} tokens."
                    raise InvalidRequestError(message, param=name)
        if self.text is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequestError(f"{name} needs a tokenizer; the engine has none (skip_tokenizer_init=True).", param=name)

    def _messages(
        self, group_id: str, prompt: TokenizedPrompt, params: SamplingParams, context: RequestContext, arrival_s: float
    ) -> list[AddRequest]:
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        eos = frozenset() if params.ignore_eos else self.info.eos_token_ids
        bad_words = encode_bad_words(self.text, params.bad_words) if self.text is not None and params.bad_words else ()
        return [
            AddRequest(
                request_id=group_id if index == 0 else f"{group_id}#{index}",
                group_id=group_id,
                prompt_token_ids=prompt.token_ids,
                params=params.replace(n=1, seed=_choice_seed(seed, index), prompt_logprobs=params.prompt_logprobs if index == 0 else None),
                arrival_s=arrival_s,
                choice_index=index,
                num_choices=params.n,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                eos_token_ids=eos,
                bad_words_token_ids=bad_words,
                priority=context.priority,
                tenant=context.tenant,
                cache_salt=context.cache_salt,
                request_class=context.request_class,
                adapter=context.adapter,
            )
            for index in range(params.n)
        ]

    def _register(self, stream: RequestStream, messages: list[AddRequest]) -> None:
        if self._draining:
            raise EngineClosedError("The engine is draining and takes no more requests.")
        with self._lock:
            if any(message.request_id in self._streams for message in messages):
                raise InvalidRequestError(f"request_id {stream.request_id!r} is in use; give each request its own.", param="request_id")
            for message in messages:
                self._streams[message.request_id] = stream
        try:
            for message in messages:
                self._send(message)
        except EngineClosedError:
            self._forget(stream)
            raise

    def _forget(self, stream: RequestStream) -> None:
        with self._idle:
            for request_id in stream.request_ids:
                self._streams.pop(request_id, None)
            if not self._streams:
                self._idle.notify_all()


def _choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the request's own seed; the others step through 64 bits by the golden ratio."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF


def _prompt_of_mapping(prompt: Mapping[str, object]) -> str | Sequence[int]:
    known = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(known) != 1 or len(prompt) != 1:
        raise InvalidRequestError(
            f"A prompt mapping must hold either 'prompt' or 'prompt_token_ids' and nothing else, got {sorted(prompt)}.", param="prompt"
        )
    return prompt[known[0]]  # type: ignore[return-value]
