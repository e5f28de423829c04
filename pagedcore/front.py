"""The front of an engine, in whatever process it runs: prompts become messages, updates become outputs.

Everything that needs text happens here, off the engine thread: tokenizing, unfolding n, detokenizing, stop strings.
"""

from __future__ import annotations

import asyncio
import operator
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pagedcore.client import ModelInfo, RequestContext, check_text
from pagedcore.errors import EngineClosedError, InvalidRequestError, id_in_use
from pagedcore.grammar.grammars import Grammars, prepare
from pagedcore.long_lists import is_within, pieces
from pagedcore.messages import AddRequest, InboxMessage, RequestUpdate
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import LoopWaker, QueueWaker, RequestStream, Waker
from pagedcore.sampling_params import SamplingParams
from pagedcore.shown import shown
from pagedcore.text.bad_words import encode_bad_words
from pagedcore.text.tokenizer import Tokenizer
from pagedcore.traceparent import current_traceparent

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids (also an array or tensor of them), or a mapping with `prompt` or `prompt_token_ids`."""

INLINE_PROMPT_LENGTH = 4096
"""Prompts of more characters, or token ids, are read in a worker thread, so that an event loop never stalls."""

MAX_ENDING_S = 10.0
"""How long a new request waits for the end of an abandoned one of the same id."""

Send = Callable[[InboxMessage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; `text` is None when the caller gave token ids."""

    text: str | None
    token_ids: list[int]


class Front:
    """Owns the open streams of one engine. `deliver` may be called from any thread, `generate` from any event loop."""

    def __init__(self, info: ModelInfo, text: Tokenizer | None, send: Send, grammars: Grammars | None = None) -> None:
        """`grammars` are the engine's where it is in this process; otherwise the front checks with its own."""
        self.info = info
        if grammars is None and text is not None:
            grammars = Grammars(text.to_json, info.vocab_size, info.eos_token_ids)
        self._grammars = grammars
        self.text = text
        self._send = send
        self._streams: dict[str, RequestStream] = {}
        """By the request id of each choice."""
        self._ending: set[str] = set()
        """Request ids whose caller has left and whose last update is still to come; until then they are in use."""
        self._lock = threading.RLock()  # a generator that is garbage-collected under it closes its stream
        self._changed = threading.Condition(self._lock)
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
        _check_request_id(request_id)
        tokenized = await self._tokenize_async(prompt, add_special_tokens)
        if self._has_to_compile(params):
            await asyncio.to_thread(self.prepare, params)
        if request_id in self._ending:
            await asyncio.to_thread(self._wait_until_ended, request_id)
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
        _check_request_id(request_id)
        tokenized = self.tokenize(prompt, add_special_tokens)
        self._wait_until_ended(request_id)
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
            limit = self.info.max_model_len
            token_ids = self.text.encode(prompt, add_special_tokens=add_special_tokens, max_prompt_tokens=limit)
            return TokenizedPrompt(text=prompt, token_ids=token_ids)
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
        """Send one request to the engine, n choices of it. Raises `EngineClosedError`, what `prepare` raises, or
        `InvalidRequestError` for the parameters and for an id that is in use."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be a SamplingParams, got {type(params).__name__}.", param="params")
        self._check_token_parameters(params)
        self.prepare(params)
        group_id = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        messages = self._messages(group_id, prompt, params, context or RequestContext(), arrival_s)
        stream = RequestStream(group_id, prompt.text, prompt.token_ids, params, self.text, self._send, waker, len(messages))
        self._register(stream, messages)
        return stream

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of `structured_outputs`, so that `open` returns at once. Raises what `Grammars.prepare` raises."""
        if params.structured_outputs is not None:
            prepare(self._grammars, params.structured_outputs)

    def close_stream(self, stream: RequestStream) -> None:
        """Forget a stream; what of it still runs is aborted."""
        if self._forget(stream) and not stream.abort():
            self._release(stream.running_request_ids)

    async def abort(self, request_id: str) -> None:
        """Abort all choices of a request; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        self.abort_sync(request_id)

    def abort_sync(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()

    # ---- the engine's side

    def deliver(self, updates: list[RequestUpdate]) -> None:
        """Take one step's updates: each stream gets its own, each waiting thread or loop is woken once."""
        woken: dict[object, list[RequestStream]] = {}
        find = self._streams.get
        for update in updates:
            stream = find(update.request_id) if update.finish_reason is None else self._find_last(update.request_id)
            if stream is None or not stream.put(update):
                continue  # its caller has left, or has been woken already
            streams = woken.get(stream.wake_key)
            if streams is None:
                woken[stream.wake_key] = [stream]
            else:
                streams.append(stream)
        for streams in woken.values():
            if not streams[0].waker.wake(streams):
                for stream in streams:
                    self.close_stream(stream)

    # ---- draining

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def is_draining(self) -> bool:
        return self._draining

    def begin_drain(self) -> None:
        """Take no more requests; the open ones go on."""
        with self._lock:  # whoever registers now is seen by who waits for the open ones
            self._draining = True

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait until the open ones have ended; False when time ran out first."""
        self.begin_drain()
        with self._changed:
            return self._changed.wait_for(lambda: not self._streams and not self._ending, timeout=timeout_s)

    # ---- inside

    async def _tokenize_async(self, prompt: Prompt, add_special_tokens: bool) -> TokenizedPrompt:
        if _prompt_length(prompt) > INLINE_PROMPT_LENGTH:
            return await asyncio.to_thread(self.tokenize, prompt, add_special_tokens)
        return self.tokenize(prompt, add_special_tokens)

    def _has_to_compile(self, params: SamplingParams) -> bool:
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        return structured is not None and self._grammars is not None and not self._grammars.is_ready(structured)

    def _checked_ids(self, prompt: object) -> list[int]:
        token_ids = _integers(prompt)
        if not is_within(token_ids, 0, self.info.vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < self.info.vocab_size)
            message = f"Token id {shown(wrong)} is outside the vocabulary of {self.info.vocab_size} tokens."
            raise InvalidRequestError(message, param="prompt")
        return token_ids

    def _check_token_parameters(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= self.info.vocab_size:
                    message = f"{name} holds token id {shown(token_id)}; the vocabulary has {self.info.vocab_size} tokens."
                    raise InvalidRequestError(message, param=name)
        if self.text is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequestError(f"{name} needs a tokenizer; the engine has none (skip_tokenizer_init=True).", param=name)

    def _messages(
        self, group_id: str, prompt: TokenizedPrompt, params: SamplingParams, context: RequestContext, arrival_s: float
    ) -> list[AddRequest]:
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        eos = frozenset() if params.ignore_eos else self.info.eos_token_ids
        traceparent = context.traceparent or current_traceparent()
        bad_words = encode_bad_words(self.text, params.bad_words) if self.text is not None and params.bad_words else ()
        return [
            AddRequest(
                request_id=group_id if index == 0 else f"{group_id}#{index}",
                group_id=group_id,
                prompt_token_ids=prompt.token_ids,
                params=params.for_choice(_choice_seed(seed, index), has_prompt_logprobs=index == 0),
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
                user=context.user,
                adapter=context.adapter,
                traceparent=traceparent,
            )
            for index in range(params.n)
        ]

    def _register(self, stream: RequestStream, messages: list[AddRequest]) -> None:
        with self._lock:
            if self._draining:
                raise EngineClosedError("The engine is draining and takes no more requests.")
            if any(message.request_id in self._streams or message.request_id in self._ending for message in messages):
                raise id_in_use(stream.request_id)
            for message in messages:
                self._streams[message.request_id] = stream
        unsent = list(messages)
        try:
            while unsent:
                self._send(unsent[0])
                del unsent[0]
        except BaseException:
            for message in unsent:
                stream.note_end(message.request_id)
            self.close_stream(stream)
            raise

    def _find_last(self, request_id: str) -> RequestStream | None:
        """The stream for a choice's last update."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.note_end(request_id)
                return stream
        self._release([request_id])
        return None

    def _forget(self, stream: RequestStream) -> bool:
        """Take a stream out; False when it is out already. What the engine still runs of it stays in use."""
        with self._changed:
            if not any(self._streams.get(request_id) is stream for request_id in stream.request_ids):
                return False
            for request_id in stream.request_ids:
                del self._streams[request_id]
            self._ending.update(stream.running_request_ids)
            self._changed.notify_all()
        return True

    def _release(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            self._ending.difference_update(request_ids)
            self._changed.notify_all()

    def _wait_until_ended(self, request_id: str | None) -> None:
        """A caller who asks again under the id of a request that he has just left waits for its end."""
        with self._changed:
            self._changed.wait_for(lambda: request_id not in self._ending, timeout=MAX_ENDING_S)


def _choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the request's own seed; the others step through 64 bits by the golden ratio."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF


def _check_request_id(request_id: object) -> None:
    if request_id is not None:
        check_text(request_id, "request_id")


def _prompt_length(prompt: object) -> int:
    """Characters or token ids; 0 for what is neither."""
    if isinstance(prompt, Mapping):
        return max(map(_prompt_length, prompt.values()), default=0)
    return len(prompt) if isinstance(prompt, (str, Sequence)) or getattr(prompt, "shape", None) else 0  # type: ignore[arg-type]


def _integers(values: object) -> list[int]:
    """Token ids as Python's own integers, out of a list, an array or a tensor. Raises `InvalidRequestError`."""
    try:
        if hasattr(values, "tolist"):
            values = values.tolist()
        if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray)):
            return list(chain.from_iterable(map(_integers_of_piece, pieces(values))))
    except TypeError:
        pass
    raise InvalidRequestError(f"A prompt must be text or token ids, got {shown(values)}.", param="prompt")


def _integers_of_piece(values: Sequence[Any]) -> list[int]:
    """Raises `TypeError` for what is no integer, and for booleans."""
    kinds = set(map(type, values))
    if bool in kinds:
        raise TypeError("a token id is no boolean")
    return list(values if kinds == {int} else map(operator.index, values))


def _prompt_of_mapping(prompt: Mapping[str, object]) -> str | Sequence[int]:
    known = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(known) != 1 or len(prompt) != 1:
        raise InvalidRequestError(
            f"A prompt mapping must hold either 'prompt' or 'prompt_token_ids' and nothing else, got {shown(list(prompt))}.", param="prompt"
        )
    return prompt[known[0]]  # type: ignore[return-value]
