"""What one choice has so far, and outputs of it that copy no more than their reader looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedcore.outputs import CompletionOutput, FinishReason, Logprob


class ChoiceSoFar:
    """Owns what grows with a choice. One thread adds to it; any may look at the outputs that were made of it."""

    __slots__ = ("_joined", "_num_seen_pieces", "_num_seen_tokens", "cumulative_logprob", "index", "logprobs", "pieces", "token_ids")

    def __init__(self, index: int, *, has_logprobs: bool) -> None:
        self.index = index
        self.pieces: list[str] = []
        """Of the text; none is empty."""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self.cumulative_logprob = 0.0 if has_logprobs else None
        self._num_seen_pieces = self._num_seen_tokens = 0
        self._joined = (0, "")
        """How many pieces were joined the last time, and to what."""

    def add(self, token_ids: Sequence[int], text: str) -> None:
        self.token_ids += token_ids
        if text:
            self.pieces.append(text)

    def text(self, num_pieces: int) -> str:
        """The first pieces, joined: who looks at each output pays for what is new in it, and who looks at none, for nothing."""
        num_joined, text = self._joined
        if num_joined > num_pieces:
            return "".join(self.pieces[:num_pieces])
        if num_joined < num_pieces:
            text += "".join(self.pieces[num_joined:num_pieces])
            self._joined = num_pieces, text  # at once: another thread may do the same
        return text

    def partial(self) -> PartialOutput:
        """The choice as it stands, and what is new since the last time."""
        output = PartialOutput.__new__(PartialOutput)
        output.view(self, self._num_seen_pieces, self._num_seen_tokens)
        self._num_seen_pieces, self._num_seen_tokens = len(self.pieces), len(self.token_ids)
        return output

    def last(self, finish_reason: FinishReason, stop_reason: int | str | None) -> CompletionOutput:
        """The whole choice, which has ended."""
        seen = self.partial()
        return CompletionOutput(
            self.index,
            seen.text,
            seen.token_ids,
            seen.logprobs,
            seen.cumulative_logprob,
            finish_reason,
            stop_reason,
            seen.new_text,
            seen.new_token_ids,
        )


class PartialOutput(CompletionOutput):
    """A choice that goes on. Fields that grow with it are made when somebody looks at them, and are the reader's own from then on: a copy
    for each token would cost more and more."""

    __slots__ = ("_num_logprobs", "_num_old_tokens", "_num_pieces", "_num_tokens", "_so_far")

    _so_far: ChoiceSoFar
    _num_logprobs: int
    _num_pieces: int
    _num_old_tokens: int
    _num_tokens: int

    def view(self, so_far: ChoiceSoFar, num_old_pieces: int, num_old_tokens: int) -> None:
        """Show a choice as it stands; what is behind the old pieces and tokens is new."""
        pieces = so_far.pieces
        self._so_far = so_far
        self._num_pieces = num_pieces = len(pieces)
        self._num_old_tokens = num_old_tokens
        self._num_tokens = len(so_far.token_ids)
        self.new_text = pieces[num_old_pieces] if num_pieces - num_old_pieces == 1 else "".join(pieces[num_old_pieces:])
        self._num_logprobs = 0 if so_far.logprobs is None else len(so_far.logprobs)
        self.cumulative_logprob = so_far.cumulative_logprob

    def __getattr__(self, name: str) -> Any:
        """A field that has no value yet."""
        if name not in CompletionOutput.__match_args__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        value = self._made(name)
        setattr(self, name, value)
        return value

    def _made(self, name: str) -> Any:
        so_far = self._so_far
        if name == "text":
            return so_far.text(self._num_pieces)
        if name == "token_ids":
            return so_far.token_ids[: self._num_tokens]
        if name == "new_token_ids":
            return so_far.token_ids[self._num_old_tokens : self._num_tokens]
        if name == "logprobs":
            return None if so_far.logprobs is None else so_far.logprobs[: self._num_logprobs]
        return so_far.index if name == "index" else None  # no reason yet

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompletionOutput) and _values(self) == _values(other)

    __hash__ = None  # type: ignore[assignment]  # as every output: its fields may be set

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what another process gets, holds values only."""
        return PartialOutput, _values(self)


def _values(output: CompletionOutput) -> tuple[Any, ...]:
    return tuple(getattr(output, name) for name in CompletionOutput.__match_args__)
