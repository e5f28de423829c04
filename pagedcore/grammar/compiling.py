"""One grammar compiled by llguidance, within limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedcore.errors import InvalidRequestError, MissingExtraError, UnsupportedFeatureError
from pagedcore.extras import pip_command
from pagedcore.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SPACES = 32
"""Most whitespace between two parts of a JSON output: a model that falls into a loop of line breaks gets out of it."""

LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "max_grammar_size": 200_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""What bounds the time of a mask and the memory of a grammar (about 2 kB a state), and in most cases the time to compile one."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the library needs to know of a model's tokens."""

    tokenizer_json: str
    """The text of tokenizer.json."""
    vocab_size: int
    """Of the model, which may be padded, or smaller than the tokenizer's."""
    eos_token_ids: Sequence[int]

    def load(self) -> LLTokenizer:
        """Raises `UnsupportedFeatureError` for a model without an end, and for a tokenizer that the library cannot read."""
        if not self.eos_token_ids:
            message = "structured_outputs needs an end-of-sequence token, and the model names none."
            raise UnsupportedFeatureError(message, param="structured_outputs")
        num_tokens = max(self.vocab_size, 1 + max(_token_ids(json.loads(self.tokenizer_json)), default=0))
        try:
            tokens: LLTokenizer = library().LLTokenizer(self.tokenizer_json, n_vocab=num_tokens, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            message = f"structured_outputs is not offered with this model's tokenizer: {error}."
            raise UnsupportedFeatureError(message, param="structured_outputs") from error
        return tokens


def _token_ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    vocab = tokenizer["model"].get("vocab", {})
    yield from vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    yield from (token["id"] for token in tokenizer.get("added_tokens", ()))


def compile_grammar(params: StructuredOutputsParams, tokens: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of the grammar, its first mask computed. Raises `InvalidRequestError` with the library's reason."""
    grammar: LLMatcher = library().LLMatcher(tokens, source_of(params), log_level=0, limits=library().LLParserLimits(**LIMITS))
    if not grammar.is_error():
        grammar.compute_bitmask()  # finds out what only the first step would
    if grammar.is_error():
        raise refusal(params, grammar.get_error())
    return grammar


def refusal(params: StructuredOutputsParams, reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"{params.field} cannot be followed: {' '.join(str(reason).split())}.", param=params.field)


def source_of(params: StructuredOutputsParams) -> str:
    """The grammar in the form that the library compiles. Raises `InvalidRequestError` for what the library cannot read."""
    try:
        if params.kind in ("json", "json_object"):
            return str(library().LLMatcher.grammar_from_json_schema(params.text, overrides=_spaces(params)))
        if params.kind == "choice":  # one terminal: as rules of their own, thousands of choices would be too many at once
            choices = " | ".join(json.dumps(choice) for choice in params.choice or ())
            return str(library().LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
        # Of kind "grammar", Lark stays as it is; what has no rule `start` is read as GBNF.
        return str(library().grammar_from(params.kind, params.text))
    except ValueError as error:
        raise refusal(params, error) from error


def library() -> Any:
    """Raises `MissingExtraError`."""
    try:
        import llguidance
    except ImportError as error:
        message = f"structured_outputs needs llguidance, which is not installed: {pip_command('grammar')}."
        raise MissingExtraError(message) from error
    return llguidance


def _spaces(params: StructuredOutputsParams) -> dict[str, object]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": f"[ \\t\\n\\r]{{1,{MAX_SPACES}}}"}
