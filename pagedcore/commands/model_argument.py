"""The model as a command's argument: another way to say --model."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The same as --model: a folder or a hub name. None is the embedded model.", show_default=False),
]


def with_model(config: EngineConfig, source: str | None) -> EngineConfig:
    """The config with the model that was typed as an argument. Raises `ConfigError` when --model says another one."""
    if source is None:
        return config
    if config.model not in (None, source):
        raise ConfigError(f"The argument says model {source!r} and --model says {config.model!r}; give one of them.")
    return config.replace(model=source)
