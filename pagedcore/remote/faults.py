"""Errors on their way to another process: the kind by its name, the message, and what was given by keyword."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pagedcore import errors
from pagedcore.errors import EngineError, PagedCoreError


class Fault(Struct, array_like=True):
    """One error as plain data."""

    kind: str
    message: str
    facts: dict[str, Any]


def fault_of(error: Exception) -> Fault:
    """Any error; one that is not ours arrives as an `EngineError`, but for a failed check."""
    if isinstance(error, (PagedCoreError, AssertionError)):
        facts = {name: value for name, value in vars(error).items() if isinstance(value, (str, int, float, type(None)))}
        return Fault(type(error).__name__, str(error), facts)
    return Fault(EngineError.__name__, f"{type(error).__name__}: {error}", {})


def error_of(fault: Fault) -> Exception:
    """The same error again, without its causes."""
    if fault.kind == AssertionError.__name__:
        return AssertionError(fault.message)
    return engine_error_of(fault)


def engine_error_of(fault: Fault) -> PagedCoreError:
    """The same for an error of ours; a kind that is not known here is an `EngineError`."""
    kind = getattr(errors, fault.kind, EngineError)
    is_ours = isinstance(kind, type) and issubclass(kind, PagedCoreError)
    error: PagedCoreError = (kind if is_ours else EngineError)(fault.message)
    vars(error).update(fault.facts)
    return error
