"""Outputs of the engine to OpenAI objects. A whole reply is one advance from nothing to the end; a stream is many.

What a stream sends is rendered here, since it is done for every token: the head of a chunk, the same in all of them, is written once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.client import TextFront
from pagedcore.console.explanation import cache_object
from pagedcore.errors import EngineError
from pagedcore.http.json_text import dumps
from pagedcore.openai.calls import Call
from pagedcore.openai.logprobs import OffsetCounter, TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from pagedcore.outputs import CompletionOutput, Logprob, RequestOutput
from pagedcore.tools.answer import AnswerParser
from pagedcore.tools.objects import delta_of, message_of

JsonObject = dict[str, object]

MARK = "\0"
"""Stands for the text where the text of a chunk will stand."""


@dataclass(slots=True)
class _Progress:
    """What a client has of one choice."""

    offsets: OffsetCounter
    num_chars: int = 0
    num_tokens: int = 0
    has_begun: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class Delta:
    """What one advance adds to one choice."""

    index: int
    choice: CompletionOutput
    output: RequestOutput
    is_first: bool
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


class Reply:
    """Owns the progress of one call: what its client has of each choice, and what was used so far."""

    kind = chunk_kind = id_prefix = ""

    def __init__(self, call: Call, request_id: str, text: TextFront | None, role: str) -> None:
        self.call = call
        self.request_id = request_id
        self.role = role
        self.texts = TokenTexts(text, skip_special_tokens=call.params.skip_special_tokens)
        self._envelope: JsonObject = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": call.model}
        self._head = b"data: " + dumps({**self._envelope, "object": self.chunk_kind}).removesuffix(b"}") + b',"choices":'
        self._is_cache_told = not call.body.cache_report
        self._waits_for_prompt = call.params.prompt_logprobs is not None
        options = call.body.stream_options
        self._shows_tokens = call.params.logprobs is not None or call.body.return_token_ids or options.continuous_usage_stats
        self._latest: dict[int, RequestOutput] = {}
        starts = [len(prompt.text) if call.echo else 0 for prompt in call.prompts for _ in range(call.params.n)]
        self._progress = [_Progress(OffsetCounter(self.texts, start)) for start in starts]
        self._around = self._around_text() if len(starts) == 1 and self._is_text_all() else None

    # ---- what a client gets

    def opening(self) -> bytes:
        """Events before the first text."""
        return b""

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """What an output adds, as server-sent events; advances the choices of that prompt."""
        if self._around is not None and not output.finished and self._progress[0].has_begun:
            return self._text_event(self._around, output.outputs[0].new_text)
        choices = [choice for delta in self._advance(prompt_index, output) for choice in self.chunk_choices(delta)]
        if not choices:
            return b""
        *before, last = choices
        return b"".join([self._event([choice]) for choice in before]) + self._event([last], self._cache_at_the_end())

    def usage_event(self) -> bytes:
        """The last event, which belongs to no choice."""
        return self._head + b'[],"usage":' + dumps(self.usage()) + b"}\n\n"

    def whole(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The reply without a stream, from the last output of each prompt."""
        deltas = [delta for prompt_index, output in enumerate(outputs) for delta in self._advance(prompt_index, output)]
        choices = [self.form(delta) for delta in sorted(deltas, key=lambda delta: delta.index)]
        cache = {"cache": self._cache()} if self.call.body.cache_report else {}
        return {**self._envelope, "object": self.kind, "choices": choices, "usage": self.usage(), **cache}

    def usage(self) -> JsonObject:
        """Tokens so far, counted by the engine; a prompt counts once, whatever n is."""
        outputs = self._latest.values()
        num_prompt = sum(len(prompt.token_ids) for prompt in self.call.prompts)
        num_completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion}
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}}

    def check_ended(self) -> None:
        """Raise `EngineError` unless every choice has its finish_reason."""
        if not self._has_ended:
            raise EngineError("The engine ended the request before all of its choices were finished.")

    # ---- the form of one choice

    def form(self, delta: Delta) -> JsonObject:
        """A choice of the whole reply."""
        raise NotImplementedError

    def chunk_choices(self, delta: Delta) -> list[JsonObject]:
        """The same as one choice each of as many chunks as it takes."""
        return [self.form(delta)]

    def choice(self, new: Delta, logprobs: JsonObject | None, /, **form: object) -> JsonObject:
        """What the forms have in common, and beyond OpenAI's fields what was asked for and why a finished choice stopped."""
        choice = {"index": new.index, **form, "logprobs": logprobs, "finish_reason": new.choice.finish_reason}
        if new.choice.finished:
            choice["stop_reason"] = new.choice.stop_reason
        if self.call.body.return_token_ids:
            choice |= {"token_ids": new.token_ids, **({"prompt_token_ids": new.output.prompt_token_ids} if new.is_first else {})}
        if new.is_first and self.call.body.prompt_logprobs is not None and new.output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(new.output.prompt_logprobs, self.texts)
        return choice

    def text_choice(self, text: str) -> JsonObject:
        """The choice of a chunk that adds nothing but text."""
        raise NotImplementedError

    # ---- inside

    def _is_text_all(self) -> bool:
        """Whether chunks between the first and the last show nothing but text."""
        return not (self._shows_tokens or self._waits_for_prompt)

    def _around_text(self) -> tuple[bytes, bytes]:
        """The event of such a chunk, before the text and after it: for one choice always the same."""
        before, _, after = self._event([self.text_choice(MARK)]).rpartition(dumps(MARK))
        return before, after

    def _text_event(self, around: tuple[bytes, bytes], new_text: str) -> bytes:
        before, after = around
        self._progress[0].num_chars += len(new_text)
        return before + dumps(new_text) + after if new_text else b""

    def _event(self, choices: list[JsonObject], more: bytes = b"") -> bytes:
        options = self.call.body.stream_options
        if options.continuous_usage_stats:
            more += b',"usage":' + dumps(self.usage())
        elif options.include_usage:
            more += b',"usage":null'
        return self._head + dumps(choices) + more + b"}\n\n"

    def _cache_at_the_end(self) -> bytes:
        """With cache_report the chunk that ends the last choice carries it: it is no usage, which comes only when asked for."""
        if self._is_cache_told or not self._has_ended:
            return b""
        self._is_cache_told = True
        return b',"cache":' + dumps(self._cache())

    def _cache(self) -> JsonObject:
        return cache_object([output.cache for output in self._latest.values() if output.cache is not None])

    @property
    def _has_ended(self) -> bool:
        return all(progress.has_ended for progress in self._progress)

    def _advance(self, prompt_index: int, output: RequestOutput) -> list[Delta]:
        self._latest[prompt_index] = output
        if self._waits_for_prompt and output.prompt_logprobs is None and not output.finished:
            return []  # the first chunk of a choice carries them
        first_index = prompt_index * self.call.params.n
        return [delta for choice in output.outputs if (delta := self._delta(first_index + choice.index, choice, output))]

    def _delta(self, index: int, choice: CompletionOutput, output: RequestOutput) -> Delta | None:
        """What is new since the last advance; None when there is nothing to show."""
        progress = self._progress[index]
        text, token_ids = choice.text[progress.num_chars :], choice.token_ids[progress.num_tokens :] if self._shows_tokens else []
        if progress.has_ended or not (text or choice.finished or token_ids):
            return None
        logprobs = [] if choice.logprobs is None else choice.logprobs[progress.num_tokens :]
        delta = Delta(index, choice, output, not progress.has_begun, text, token_ids, logprobs)
        progress.num_chars, progress.num_tokens = len(choice.text), progress.num_tokens + len(token_ids)
        progress.has_begun, progress.has_ended = True, choice.finished
        return delta


class CompletionReply(Reply):
    """The form of /v1/completions."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def form(self, delta: Delta) -> JsonObject:
        echoes = self.call.echo and delta.is_first
        prompt = self.call.prompts[delta.index // self.call.params.n].text if echoes else ""
        return self.choice(delta, self._logprobs(delta, echoes=echoes), text=prompt + delta.text)

    def text_choice(self, text: str) -> JsonObject:
        """The choice of a chunk that adds nothing but text."""
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, delta: Delta, *, echoes: bool) -> JsonObject | None:
        num_top = self.call.params.logprobs
        if num_top is None:
            return None
        token_ids, logprobs = delta.token_ids, list[dict[int, Logprob] | None](delta.logprobs)
        offsets = self._progress[delta.index].offsets.take(token_ids)
        if echoes and delta.output.prompt_logprobs is not None:
            prompt_ids = delta.output.prompt_token_ids
            offsets = OffsetCounter(self.texts).take(prompt_ids) + offsets
            token_ids, logprobs = prompt_ids + token_ids, delta.output.prompt_logprobs + logprobs
        return completion_logprobs(token_ids, logprobs, offsets, num_top, self.texts)


class ChatReply(Reply):
    """The form of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, call: Call, request_id: str, text: TextFront | None, role: str) -> None:
        self._parsers: dict[int, AnswerParser] = {}
        super().__init__(call, request_id, text, role)

    def opening(self) -> bytes:
        """The role of each choice."""
        begun = {"delta": {"role": self.role, "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join([self._event([{"index": index, **begun}]) for index in range(self.call.params.n)])

    def form(self, delta: Delta) -> JsonObject:
        message = message_of(self._parser(delta.index).push(delta.text, is_last=True), self.role)
        return self._with_reason(delta, self.choice(delta, self._logprobs(delta), message=message))

    def chunk_choices(self, delta: Delta) -> list[JsonObject]:
        """One for each piece of text and of a call; the last one has what belongs to all of them."""
        forms = [delta_of(part) for part in self._parser(delta.index).push(delta.text, is_last=delta.choice.finished)]
        if not forms and not (delta.choice.finished or delta.is_first or self._shows_tokens):
            return []
        *before, last = forms or [{}]
        plain: list[JsonObject] = [{"index": delta.index, "delta": form, "logprobs": None, "finish_reason": None} for form in before]
        logprobs = self._logprobs(delta) if delta.token_ids else None
        return [*plain, self._with_reason(delta, self.choice(delta, logprobs, delta=last))]

    def text_choice(self, text: str) -> JsonObject:
        """The choice of a chunk that adds nothing but text."""
        return {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _is_text_all(self) -> bool:
        return self.call.answer.is_plain and super()._is_text_all()

    def _parser(self, index: int) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = self.call.answer.parser(self.call.prompts[0].text)
        return self._parsers[index]

    def _logprobs(self, delta: Delta) -> JsonObject | None:
        num_top = self.call.params.logprobs
        return None if num_top is None else chat_logprobs(delta.token_ids, delta.logprobs, num_top, self.texts)

    def _with_reason(self, delta: Delta, choice: JsonObject) -> JsonObject:
        """An answer that calls ends with the calls."""
        ends_with_calls = choice["finish_reason"] == "stop" and self._parser(delta.index).has_calls
        return {**choice, "finish_reason": "tool_calls"} if ends_with_calls else choice


REPLIES: dict[str, type[Reply]] = {"chat": ChatReply, "completion": CompletionReply}
"""Endpoint of a call -> the form of its reply."""
