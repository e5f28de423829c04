"""`from pagedcore.engine.arg_utils import AsyncEngineArgs`."""

from __future__ import annotations

from pagedcore.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
