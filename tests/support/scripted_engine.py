"""An engine that answers from a script: for commands, which only open streams and read outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pagedcore.errors import PagedCoreError, RequestError
from pagedcore.outputs import CacheReport, CompletionOutput, RequestOutput, RequestTimings
from pagedcore.sampling_params import SamplingParams


@dataclass(slots=True)
class ScriptedText:
    """Encodes a character as its code point; a chat is rendered as role:content lines."""

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        return "".join(f"{message['role']}:{message['content']}\n" for message in messages)


@dataclass(slots=True)
class ScriptedEngine:
    """Gives `pieces` for every prompt and remembers what it was asked. `error` is raised before the first piece."""

    pieces: Sequence[str] = ("Par", "is")
    error: RequestError | None = None
    failure: PagedCoreError | None = None
    num_cached_tokens: int = 0
    text: ScriptedText | None = field(default_factory=ScriptedText)
    asked: list[tuple[Any, SamplingParams, bool]] = field(default_factory=list)
    config: Any = None
    num_closed_early: int = 0
    is_closed: bool = False

    info: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=256))
    plan: Any = field(default_factory=lambda: SimpleNamespace(model_name="scripted", dtype="float32", device="cpu", block_size=16))

    def get_tokenizer(self) -> ScriptedText | None:
        return self.text

    def generate_sync(
        self, prompt: Any, params: SamplingParams, request_id: str | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[RequestOutput]:
        self.asked.append((prompt, params, add_special_tokens))
        if self.error is not None:
            raise self.error
        finished = False
        try:
            for number in range(1, len(self.pieces) + 1):
                finished = number == len(self.pieces)
                yield self._output(prompt, number, finished)
        finally:
            self.num_closed_early += not finished

    def close_sync(self) -> None:
        self.is_closed = True

    def _output(self, prompt: Any, number: int, finished: bool) -> RequestOutput:
        choice = CompletionOutput(
            index=0,
            text="".join(self.pieces[:number]),
            token_ids=list(range(number)),
            new_text=self.pieces[number - 1],
            finish_reason="stop" if finished else None,
        )
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[0] * len(prompt),
            outputs=[choice],
            finished=finished,
            error=self.failure,
            cache=CacheReport(num_prompt_tokens=len(prompt), pool_tokens=self.num_cached_tokens, miss_blocks={"cold": 2}),
            timings=RequestTimings(arrival_s=10.0, admitted_s=10.0, first_token_s=10.25, finished_s=10.5 if finished else None),
        )
