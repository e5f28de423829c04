"""What form an output must have: one of JSON, a regular expression, some choices or a grammar."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown

MAX_GRAMMAR_CHARS = 2**18
"""Longest schema, regular expression, grammar or list of choices, as text."""

MAX_MARKER_CHARS = 64
"""Longest text that opens or ends reasoning."""

KINDS = ("json", "json_object", "regex", "choice", "grammar")


_SETTINGS = ("disable_any_whitespace", "reasoning_end", "reasoning_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output; exactly one is given. Raises `InvalidRequestError` for none, for several and for a wrong type.

    Whether a schema, expression or grammar can be followed is found out when a request is made with it.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as an object or as JSON text. The output has its properties in the schema's order."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar in Lark or GBNF form; its first rule is `start` or `root`."""
    disable_any_whitespace: bool = False
    """Write JSON without whitespace between its parts."""
    reasoning_end: str | None = None
    """The text that ends the model's reasoning, such as "</think>", one token or spelled: tokens are free until it is written, and the form
    holds after it. An output that ends before, by end-of-sequence or a limit, has reasoning only. None: it holds from the first token."""
    reasoning_start: str | None = None
    """The text by which an output opens its reasoning, such as "<think>": one that does not begin with it follows the form from its first
    token. None with `reasoning_end`: the prompt has opened it."""
    field: str = dataclasses.field(default="structured_outputs", compare=False, repr=False)
    """What the caller wrote it in, as errors name it."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise _error(f"structured_outputs needs exactly one of {', '.join(KINDS)}, got {' and '.join(given) or 'none of them'}.")
        if not isinstance(self.disable_any_whitespace, bool):
            raise _error(f"structured_outputs.disable_any_whitespace must be true or false, got {shown(self.disable_any_whitespace)}.")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise _error(f"structured_outputs.disable_any_whitespace goes with json or json_object, not with {given[0]}.")
        self._check_reasoning()
        object.__setattr__(self, given[0], _NORMALISE[given[0]](getattr(self, given[0])))
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise _error(f"structured_outputs.{given[0]} has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken.")

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams | None:
        """The params themselves, or made from a mapping of their fields. Raises `InvalidRequestError` for anything else."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _error(f"structured_outputs must be an object with one of {', '.join(KINDS)}, got {shown(value)}.")
        fields = {str(name): entry for name, entry in value.items() if entry is not None}
        unknown = sorted(set(fields) - {*KINDS, *_SETTINGS})
        if unknown:
            raise _error(f"structured_outputs.{unknown[0]} is not offered; give one of {', '.join(KINDS)}.")
        return cls(**fields)

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is given."""
        return self._given()[0]

    @property
    def text(self) -> str:
        """The one that is given, as text; json_object is the schema of an object."""
        value = '{"type": "object"}' if self.json_object else getattr(self, self.kind)
        return value if isinstance(value, str) else json_module.dumps(list(value), ensure_ascii=False)

    def _check_reasoning(self) -> None:
        for name in ("reasoning_end", "reasoning_start"):
            text = getattr(self, name)
            if text is not None and not _is_marker(text):
                raise _error(f"structured_outputs.{name} must be a text of 1 to {MAX_MARKER_CHARS} characters, got {shown(text)}.")
        if self.reasoning_start is not None and self.reasoning_end is None:
            raise _error("structured_outputs.reasoning_start goes with reasoning_end, the text after which the form begins; give both.")

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and (name != "json_object" or self.json_object is not False)]


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")


def _is_marker(text: object) -> bool:
    """Half of a surrogate pair is in no tokenizer's text."""
    if not isinstance(text, str) or len(text) > MAX_MARKER_CHARS or not text.strip():
        return False
    return text.encode(errors="ignore").decode() == text


def _schema_text(schema: object) -> str:
    """The order of keys is kept: it is the order of an output's properties."""
    try:
        parsed = json_module.loads(schema) if isinstance(schema, str) else schema
        text = json_module.dumps(parsed, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise _error(f"structured_outputs.json must be a JSON schema, an object or its JSON text, got {shown(schema)}.")
    return text


def _flag(value: object) -> bool:
    if value is not True:
        raise _error(f"structured_outputs.json_object must be true or false, got {shown(value)}.")
    return True


def _regex(value: object) -> str:
    return _nonempty("regex", value)


def _grammar(value: object) -> str:
    return _nonempty("grammar", value)


def _nonempty(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _error(f"structured_outputs.{name} must be a text that is not empty, got {shown(value)}.")
    return value


def _choices(value: object) -> tuple[str, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(isinstance(text, str) and text for text in value):  # type: ignore[attr-defined]
        raise _error(f"structured_outputs.choice must be a list of texts, none of them empty, got {shown(value)}.")
    return tuple(value)  # type: ignore[arg-type]


_NORMALISE = {"json": _schema_text, "json_object": _flag, "regex": _regex, "choice": _choices, "grammar": _grammar}
