"""The error that every adapter raises when its framework is not installed."""

from __future__ import annotations

from pagedcore.errors import MissingExtraError
from pagedcore.extras import pip_command


def missing_extra(module: str, extra: str, cause: ImportError) -> ImportError:
    """The error to raise for `cause`: a `MissingExtraError` if `module` itself is absent, else `cause` as it is."""
    if cause.name is None or cause.name.split(".")[0] != module:
        return cause
    return MissingExtraError(f"{module} is not installed and this adapter needs it; install it with: {pip_command(extra)}.")
