"""The text of one choice as the front builds it: detokenized, and ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagedcore.errors import InvalidRequestError
from pagedcore.text.detokenizer import Detokenizer, TextStream
from pagedcore.text.stop import StopStrings

if TYPE_CHECKING:
    from pagedcore.sampling_params import SamplingParams
    from pagedcore.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push adds to a choice."""

    new_text: str
    matched_stop: str | None
    num_tokens_kept: int
    """Tokens of the choice so far: all that were pushed, or up to the one that completed the stop string.
    Text may lag behind the ids (a character or a stop string in the making); when the choice ends, both are whole."""


class ChoiceText:
    """Owns the partial text of one choice; what is pushed after a stop string was found adds nothing.

    Stop strings are looked for in the text behind the first `min_tokens` tokens.
    Without a tokenizer, or with `detokenize=False`, the text stays empty and tokens are only counted.
    Raises `InvalidRequestError` for stop strings without a tokenizer.
    """

    __slots__ = ("_detokenizer", "_matched", "_min_tokens", "_num_tokens", "_stops")

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if params.stop and tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and skip_tokenizer_init=True loads none; use stop_token_ids.", param="stop"
            )
        self._detokenizer: TextStream = _NoText()
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._matched: str | None = None

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """The new text of tokens that are not the last ones, for a choice without stop strings: `push` of what most steps bring."""
        self._num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def push(self, token_ids: Sequence[int], finished: bool) -> TextDelta:
        """Add new tokens; `finished` says that no more will come, and gives out what was held back."""
        if self._stops is not None:
            return self._push_to_stop(self._stops, token_ids, finished)
        self._num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids)
        if finished:
            text += self._detokenizer.finish()
        return TextDelta(text, None, self._num_tokens)

    def _push_to_stop(self, stops: StopStrings, token_ids: Sequence[int], finished: bool) -> TextDelta:
        """Token by token, so that the one that completes a stop string is known."""
        text = ""
        for token_id in token_ids:
            if self._matched is not None:
                break
            self._num_tokens += 1
            certain = self._detokenizer.push((token_id,))
            if self._num_tokens > self._min_tokens:
                certain, self._matched = stops.push(certain)
            text += certain
        if finished and self._matched is None:
            text += self._end(stops)
        return TextDelta(text, self._matched, self._num_tokens)

    def _end(self, stops: StopStrings) -> str:
        certain, self._matched = stops.push(self._detokenizer.finish())
        return certain if self._matched is not None else certain + stops.finish()


class _NoText:
    """A stream of tokens whose text nobody wants."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""
