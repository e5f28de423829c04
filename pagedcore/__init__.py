"""pagedcore: an LLM inference engine to embed. Importing it is cheap: each public name loads its module on first use."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagedcore.advice.advice import Advice
    from pagedcore.async_engine import AsyncEngine
    from pagedcore.async_engine import AsyncEngine as AsyncLLMEngine
    from pagedcore.config import EngineConfig, EnginePlan
    from pagedcore.engine_args import AsyncEngineArgs, EngineArgs
    from pagedcore.errors import (
        AuthenticationError,
        CheckpointError,
        ConfigError,
        EngineClosedError,
        EngineError,
        EngineRefusedError,
        EngineUnreachableError,
        InvalidRequestError,
        MissingExtraError,
        ModelLoadError,
        ModelNotFoundError,
        ModelSourceError,
        NoAnswerError,
        OperatorOnlyError,
        PagedCoreError,
        PoolTooSmallError,
        PromptTooLongError,
        QueueFullError,
        RequestError,
        RequestTooLargeError,
        StepFailedError,
        TenantQuotaError,
        UnknownOptionError,
        UnknownRequestError,
        UnsupportedFeatureError,
        UnsupportedMediaTypeError,
    )
    from pagedcore.llm import LLM
    from pagedcore.observe.stats import StatsSnapshot
    from pagedcore.outputs import CacheReport, CompletionOutput, Logprob, RequestOutput
    from pagedcore.sampling_params import SamplingParams
    from pagedcore.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "Advice",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "AuthenticationError",
    "CacheReport",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "EnginePlan",
    "EngineRefusedError",
    "EngineUnreachableError",
    "InvalidRequestError",
    "Logprob",
    "MissingExtraError",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelSourceError",
    "NoAnswerError",
    "OperatorOnlyError",
    "PagedCoreError",
    "PoolTooSmallError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestTooLargeError",
    "SamplingParams",
    "StatsSnapshot",
    "StepFailedError",
    "StructuredOutputsParams",
    "TenantQuotaError",
    "UnknownOptionError",
    "UnknownRequestError",
    "UnsupportedFeatureError",
    "UnsupportedMediaTypeError",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "Advice": "advice.advice",
    "AsyncEngine": "async_engine",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLMEngine": "async_engine",
    "CacheReport": "outputs",
    "CompletionOutput": "outputs",
    "EngineArgs": "engine_args",
    "EngineConfig": "config",
    "EnginePlan": "config",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StatsSnapshot": "observe.stats",
    "StructuredOutputsParams": "structured_outputs",
}
"""Module of each public name; those not listed are errors."""

_ALIASES = {"AsyncLLMEngine": "AsyncEngine"}

# The import paths that people type from another engine (pagedcore.engine.arg_utils, ...) are found in compat/, after our own.
__path__ = [*__path__, os.path.join(os.path.dirname(__file__), "compat")]  # noqa: PTH118, PTH120 (pathlib would cost 10 ms)


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562). Raises `AttributeError` for any other name."""
    if name not in __all__:
        raise AttributeError(f"module 'pagedcore' has no attribute {name!r}")
    module = importlib.import_module(f"pagedcore.{_HOMES.get(name, 'errors')}")
    value = getattr(module, _ALIASES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
