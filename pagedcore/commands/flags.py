"""Command-line flags made from the fields of `EngineConfig` and `SamplingParams`: one flag a field, its docstring the help."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from pagedcore.commands.field_docs import field_docs
from pagedcore.config import EngineConfig
from pagedcore.config_checks import BLOCK_SIZES, DTYPES
from pagedcore.sampling_params import SamplingParams

_ENGINE_CHOICES: dict[str, tuple[object, ...]] = {
    "block_size": BLOCK_SIZES,
    "dtype": DTYPES,
}
"""Choices of fields whose type does not say them; shown in the help, checked by `EngineConfig`."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One field as a flag: what the parser makes of its value, and what the help shows."""

    field: str
    type: Any
    help: str
    default: str | None
    """As the help shows it; None when there is nothing to show."""
    metavar: str | None
    is_number_or_word: bool = False
    """It comes as text, and may be a number or true and false (max_model_len, overlap)."""

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    def as_parameter(self) -> inspect.Parameter:
        """Absent is None (or an empty list), so that only what was typed is passed on."""
        spelling = f"{self.name}/--no-{self.name[2:]}" if self.type is bool else self.name
        option = typer.Option(spelling, help=self._full_help(), metavar=self.metavar, show_default=False)
        annotation = Annotated[self.type if typing.get_origin(self.type) is list else self.type | None, option]  # type: ignore[valid-type]
        return inspect.Parameter(self.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _full_help(self) -> str:
        repeated = " May be repeated." if typing.get_origin(self.type) is list else ""
        return f"{self.help}{repeated}" + (f" [default: {self.default}]" if self.default is not None else "")


def engine_flags() -> list[Flag]:
    """A flag for each field of `EngineConfig`, in its order."""
    return _flags(EngineConfig, _ENGINE_CHOICES)


def sampling_flags() -> list[Flag]:
    """A flag for each field of `SamplingParams` that one value, or a repeated one, can express (not logit_bias, a table)."""
    left_out = {"n", "logit_bias", "structured_outputs", "logprobs", "prompt_logprobs", "detokenize"}
    return [flag for flag in _flags(SamplingParams, {}) if flag.field not in left_out]


def takes_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command whose first parameter is an `EngineConfig`: it gets a flag for each field instead, after its own."""
    return _wrap(command, engine_flags(), EngineConfig.from_mapping)


def takes_sampling_flags(defaults: Mapping[str, object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for a first parameter that is a `SamplingParams`; `defaults` hold where no flag is given."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [dataclasses.replace(f, default=str(defaults[f.field])) if f.field in defaults else f for f in sampling_flags()]
        return _wrap(command, flags, lambda given: SamplingParams(**{**defaults, **given}))

    return decorate


def _wrap(command: Callable[..., None], flags: list[Flag], build: Callable[[dict[str, Any]], object]) -> Callable[..., None]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    names = {parameter.name for parameter in own}
    parameters = [*own, *(flag.as_parameter() for flag in flags if flag.field not in names)]

    def run(*first: Any, **values: Any) -> None:
        given = {flag.field: values.pop(flag.field) for flag in flags if flag.field not in names}
        words = {flag.field for flag in flags if flag.is_number_or_word}
        typed = {name: _word(value) if name in words else value for name, value in given.items() if value is not None and value != []}
        command(build(typed), *first, **values)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(cls: type, choices: Mapping[str, tuple[object, ...]]) -> list[Flag]:
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    return [_flag(field, hints[field.name], docs[field.name], choices.get(field.name)) for field in dataclasses.fields(cls)]


def _flag(field: dataclasses.Field[Any], hint: Any, doc: str, choices: tuple[object, ...] | None) -> Flag:
    choices = choices or _literals(hint)
    default = field.default
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    parser_type = _parser_type(hint)
    return Flag(
        field=field.name,
        type=parser_type,
        help=doc,
        default=None if default in (None, (), dataclasses.MISSING) else shown,
        metavar=_metavar(choices, parser_type),
        is_number_or_word=parser_type is str and any(m in (int, bool) for m in _members(hint)),
    )


def _metavar(choices: tuple[object, ...], parser_type: Any) -> str | None:
    if choices:
        return "|".join(map(str, choices)).lower()
    return f"<{typing.get_args(parser_type)[0].__name__}>" if typing.get_origin(parser_type) is list else None


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _literals(hint: Any) -> tuple[object, ...]:
    """The choices of a type made of literals (and bool); none where any number or text is right."""
    members = _members(hint)
    if not any(typing.get_origin(m) is Literal for m in members) or any(m in (int, float, str) for m in members):
        return ()
    literals = tuple(value for m in members if typing.get_origin(m) is Literal for value in typing.get_args(m))
    return (*literals, True, False) if bool in members else literals


def _word(value: object) -> object:
    """The value of a flag that is a number or a word."""
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    return int(value) if value.isdecimal() and value.isascii() else value


def _parser_type(hint: Any) -> Any:
    """What the command line makes of a value: bool, int, float, str, a list of them, or a number-or-word."""
    members = [m for m in _members(hint) if m is not type(None)]
    for member in members:
        if typing.get_origin(member) is tuple:
            return list[typing.get_args(member)[0]]  # type: ignore[misc]
    if len(members) == 1 and members[0] in (bool, int, float, str):
        return members[0]
    return str
