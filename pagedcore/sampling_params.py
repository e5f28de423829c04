"""How one request is sampled: what a caller may ask for, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown
from pagedcore.structured_outputs import StructuredOutputsParams

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy decoding."""

MAX_LOGPROBS = 64
"""Largest number of alternatives that `logprobs` and `prompt_logprobs` may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request. Raises `InvalidRequestError` naming the field when a value is out of range.

    Order of application: penalties (repetition over prompt and output; presence and frequency over the output),
    logit_bias, masks (bad_words, min_tokens, structured_outputs), temperature, min_p, top_k, top_p, then a seeded Gumbel draw.
    """

    n: int = 1
    """Number of completions of the one prompt."""
    temperature: float = 1.0
    """Divides the logits; below 1e-5 decoding is greedy (ties go to the lowest id)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this, in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one, in [0, 1]."""
    seed: int | None = None
    """Makes the draw repeatable, whoever shares the batch; None draws a seed on arrival."""
    max_tokens: int | None = 16
    """Most tokens to generate; None is as many as max_model_len leaves."""
    min_tokens: int = 0
    """Stop ids and end-of-sequence are masked until this many tokens are generated; stop strings are not looked for in their text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; also accepts one string or a list. They are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after end-of-sequence."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    bad_words: tuple[str, ...] = ()
    """Words that are never generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, each in [-100, 100]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that are in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the output, in [-2, 2]."""
    logprobs: int | None = None
    """Number of likeliest alternatives reported for each output token, beside the token itself; None is off."""
    prompt_logprobs: int | None = None
    """The same for each prompt token; such a request does not read the prefix cache."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the output: JSON by a schema, a regular expression, choices or a grammar; also accepts a mapping of its fields."""
    detokenize: bool = True
    """False leaves the text empty (token ids only)."""

    def __post_init__(self) -> None:
        given = {name for name, default in _DEFAULTS.items() if getattr(self, name) is not default}
        _normalise(self, given)
        _validate(self, given)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def for_choice(self, seed: int, *, has_prompt_logprobs: bool) -> SamplingParams:
        """What one choice of these asks for. Not checked again: it asks for nothing more, and a burst makes one for each request."""
        choice, set_field = object.__new__(type(self)), object.__setattr__
        for name, value in zip(_DEFAULTS, _VALUES(self), strict=True):
            set_field(choice, name, value)
        set_field(choice, "n", 1)
        set_field(choice, "seed", seed)
        if not has_prompt_logprobs:
            set_field(choice, "prompt_logprobs", None)
        return choice

    def clone(self) -> SamplingParams:
        """A copy (the object is frozen, so it is itself)."""
        return self


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise InvalidRequestError(f"{name} must be a string or a list of strings, got {shown(value)}.", param=name)
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
    if not is_list or not all(isinstance(t, Integral) and not isinstance(t, bool) for t in value):  # type: ignore[attr-defined]
        raise InvalidRequestError(f"{name} must be a list of token ids (integers), got {shown(value)}.", param=name)
    return tuple(map(int, value))  # type: ignore[call-overload]


def _bias(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    try:
        if isinstance(value, Mapping):
            return {_bias_token(token): _bias_value(bias) for token, bias in value.items()}
    except ValueError:
        pass
    raise InvalidRequestError(f"{name} must map token ids to numbers, got {shown(value)}.", param=name)


def _bias_token(token: object) -> int:
    """JSON writes the ids as text. Raises ValueError."""
    if isinstance(token, bool) or not isinstance(token, (str, Integral)):
        raise ValueError(token)
    return int(token)


def _bias_value(bias: object) -> float:
    """Raises ValueError."""
    if isinstance(bias, bool) or not isinstance(bias, Real):
        raise ValueError(bias)
    try:
        return float(bias)
    except OverflowError:  # an integer beyond every float
        raise ValueError(bias) from None


def _normalise(p: SamplingParams, given: set[str]) -> None:
    """`given` names the fields that are not at their defaults: each request makes several of these objects, and gives few fields."""
    set_field = object.__setattr__
    for name, normal_form in _NORMAL_FORMS.items():
        if name in given:
            set_field(p, name, normal_form(name, getattr(p, name)))
    for name in given.intersection(_NUMBERS):
        value = getattr(p, name)
        if type(value) not in _PLAIN:
            set_field(p, name, _plain(value))
    if p.top_k == -1:
        set_field(p, "top_k", 0)


def _plain(value: object) -> object:
    """Numbers of other libraries (numpy) as Python's own; anything else as it is."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _check_number(p: SamplingParams, name: str, low: float, high: float, kind: type) -> None:
    value = getattr(p, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (kind is int and not isinstance(value, int)):
        raise InvalidRequestError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {shown(value)}.", param=name)
    if not (low <= value <= high):  # also refuses NaN
        limit = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} is {shown(value)} and must be {limit}.", param=name)


MAX_INT = 2**31 - 1
"""Counts of tokens fit the device's integers."""

_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("n", 1, 128, int),
    ("temperature", 0, 100, float),
    ("top_k", 0, MAX_INT, int),
    ("min_p", 0, 1, float),
    ("top_p", 0, 1, float),
    ("min_tokens", 0, MAX_INT, int),
    ("repetition_penalty", 0.001, 100, float),
    ("presence_penalty", -2, 2, float),
    ("frequency_penalty", -2, 2, float),
)
_OPTIONAL_RANGES: tuple[tuple[str, float, float, type], ...] = (
    ("max_tokens", 1, math.inf, int),
    ("logprobs", 0, MAX_LOGPROBS, int),
    ("prompt_logprobs", 0, MAX_LOGPROBS, int),
    ("seed", -(2**63), 2**64 - 1, int),
)
_NUMBERS = tuple(name for name, *_ in _RANGES + _OPTIONAL_RANGES)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
_PLAIN = (int, float, bool, type(None))
_NORMAL_FORMS: Mapping[str, Callable[[str, object], object]] = {
    "stop": _strings,
    "bad_words": _strings,
    "stop_token_ids": _token_ids,
    "logit_bias": _bias,
    "structured_outputs": lambda name, value: StructuredOutputsParams.of(value),
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_VALUES = operator.attrgetter(*_DEFAULTS)


def _validate(p: SamplingParams, given: set[str]) -> None:
    for name, low, high, kind in _RANGES:
        if name in given:
            _check_number(p, name, low, high, kind)
    for name, low, high, kind in _OPTIONAL_RANGES:
        if name in given and getattr(p, name) is not None:
            _check_number(p, name, low, high, kind)
    for name in _FLAGS:
        if name in given and not isinstance(getattr(p, name), bool):
            raise InvalidRequestError(f"{name} must be true or false, got {shown(getattr(p, name))}.", param=name)
    _validate_together(p)
    _validate_collections(p)


def _validate_together(p: SamplingParams) -> None:
    if p.top_p == 0.0:
        raise InvalidRequestError("top_p is 0 and must be above 0 and at most 1; for greedy decoding set temperature=0.", param="top_p")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequestError(f"min_tokens is {p.min_tokens} and max_tokens is {p.max_tokens}; lower min_tokens.", param="min_tokens")
    if p.structured_outputs is not None and p.ignore_eos:
        raise InvalidRequestError("structured_outputs ends with end-of-sequence: leave ignore_eos out.", param="ignore_eos")
    if p.stop and not p.detokenize:
        raise InvalidRequestError("stop strings need the text: set detokenize=True or use stop_token_ids.", param="stop")


def _validate_collections(p: SamplingParams) -> None:
    if any(not s for s in p.stop):
        raise InvalidRequestError("stop holds an empty string, which would end every text at once; remove it.", param="stop")
    if any(not w.strip() for w in p.bad_words):
        raise InvalidRequestError("bad_words holds an empty word; remove it.", param="bad_words")
    for token, bias in p.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            message = f"logit_bias of token {shown(token)} is {bias:g} and must be between -100 and 100."
            raise InvalidRequestError(message, param="logit_bias")
    for name in ("logit_bias", "stop_token_ids"):
        if any(token < 0 for token in getattr(p, name)):
            raise InvalidRequestError(f"{name} holds a negative token id; token ids start at 0.", param=name)
