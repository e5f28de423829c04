"""`EngineArgs` and `AsyncEngineArgs`: an `EngineConfig` under the names, and with the leniency, that people type elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

from pagedcore.config import EngineConfig


class EngineArgs(EngineConfig):
    """An `EngineConfig` whose first argument may be the model, and that takes other spellings of settings (`delay_factor`).

    Raises `UnknownOptionError` naming the nearest setting, and `ConfigError` for a bad value.
    """

    __slots__ = ()

    def __init__(self, model: str | None = None, **options: Any) -> None:
        checked = EngineConfig.from_mapping({"model": model, **options})
        for f in dataclasses.fields(EngineConfig):
            object.__setattr__(self, f.name, getattr(checked, f.name))


class AsyncEngineArgs(EngineArgs):
    """The same, for `AsyncEngine.from_engine_args`."""

    __slots__ = ()
