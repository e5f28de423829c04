"""A checkpoint's quantization config, read key by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pagedcore.errors import CheckpointError


class CheckpointSettings:
    """One JSON object of a quantization config. A key that is null counts as absent.

    Every reader raises `CheckpointError` with key, value and file for a value of another kind, and where several keys that mean
    the same disagree.
    """

    def __init__(self, values: Mapping[str, Any], where: str, path: str = "") -> None:
        self._values = values
        self._where = where
        self._path = path

    def integer(self, *keys: str, default: int) -> int:
        """The number under any of `keys`."""
        key, value = self._find(keys, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(key, value, "must be a whole number")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._find((key,), default)[1]
        if not isinstance(value, bool):
            raise self.refusal(key, value, "must be true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """The text under `key`, in lower case."""
        value = self._find((key,), default, normalize=_lower)[1]
        if not isinstance(value, str):
            raise self.refusal(key, value, "must be text")
        return value

    def choice(self, *keys: str, covered: Collection[str], default: str | None) -> str:
        """The text under any of `keys`, in lower case; one of `covered`. With a default of None one must be there."""
        key, value = self._find(keys, default, normalize=_lower)
        if value not in covered:
            verb = "is" if len(covered) == 1 else "are"
            raise self.refusal(key, self._values.get(key, default), f"is not covered; {' and '.join(covered)} {verb}")
        return str(value)

    def names(self, key: str) -> tuple[str, ...]:
        """The list of texts under `key`; empty if absent."""
        value = self._find((key,), [])[1]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refusal(key, value, "must be a list of texts")
        return tuple(value)

    def pattern(self, key: str, value: str, expression: str) -> re.Pattern[str]:
        """The regular expression in `value`, one of the texts under `key`."""
        try:
            return re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise self.refusal(key, value, f"is no regular expression ({error})") from error

    def section(self, key: str) -> CheckpointSettings:
        """The object under `key`; empty if absent."""
        value = self._find((key,), {})[1]
        if not isinstance(value, dict):
            raise self.refusal(key, value, "must be an object")
        return CheckpointSettings(value, self._where, f"{self._path}{key}.")

    def sections(self) -> Iterator[tuple[str, CheckpointSettings]]:
        """Each key, in the file's order, with its object."""
        for key in self._values:
            yield key, self.section(key)

    def given(self, *keys: str) -> str:
        """The first of `keys` that is there, else the first."""
        return next((key for key in keys if self.value(key) is not None), keys[0])

    def value(self, key: str) -> Any:
        """What is under `key`, of whatever kind; None if absent."""
        return self._values.get(key)

    def refuse_given(self, key: str, why: str) -> None:
        """Raise `CheckpointError` unless `key` is absent or empty, through and through."""
        if not _is_empty(self.value(key)):
            raise self.refusal(key, self.value(key), why)

    def refusal(self, key: str, value: object, why: str) -> CheckpointError:
        """The error that says why `value` under `key` cannot be used."""
        return CheckpointError(f"{self._path}{key} is {value!r} in {self._where}, and {why}.")

    def _find(self, keys: tuple[str, ...], default: object, normalize: Callable[[Any], Any] = lambda value: value) -> tuple[str, Any]:
        given = [(key, normalize(value)) for key in keys if (value := self._values.get(key)) is not None]
        for key, value in given[1:]:
            if value != given[0][1]:
                raise self.refusal(key, value, f"{self._path}{given[0][0]}, which means the same, is {given[0][1]!r}")
        return given[0] if given else (keys[0], default)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _is_empty(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value == []
