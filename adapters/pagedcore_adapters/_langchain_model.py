"""What `ChatPagedCore` and `PagedCoreLLM` share: fields, the way to an engine, and how a call becomes a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from pagedcore import AsyncEngine, EngineConfig, SamplingParams
from pagedcore.client import RequestContext, TextFront
from pagedcore.errors import ConfigError, InvalidRequestError, ModelNotFoundError, UnsupportedFeatureError
from pagedcore_adapters._langchain_call import Call
from pagedcore_adapters.shared_engine import serve_metrics, shared_engine

EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_SAMPLING_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {"logprobs", "prompt_logprobs"}
_CONTEXT_FIELDS = frozenset({"priority", "tenant", "cache_salt", "request_class"})
_NOT_OFFERED = frozenset(
    {"tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "response_format", "logprobs", "prompt_logprobs"}
)


class PagedCoreModel(BaseModel):
    """Fields of both LangChain models. Owns nothing: the engine is the given one, or the shared one of its configuration."""

    model_name: str | None = Field(default=None, alias="model")
    """Model to load, or a name that `engine` serves; None is the embedded model (or the engine's own)."""
    temperature: float | None = None
    """None is SamplingParams' default, as for the next four."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    """None: until the model stops or its context is full."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """Strings that end the text."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Any other field of SamplingParams, and priority, tenant, cache_salt, request_class."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An `AsyncEngine` to use; None takes the shared one of (model, engine_config), started at the first call."""
    engine_config: Any = Field(default=None, exclude=True, repr=False)
    """Settings of the shared engine: an `EngineConfig` or a mapping of its fields."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port of 127.0.0.1, from construction on; None serves none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine is not None and self.engine_config is not None:
            raise ConfigError("engine and engine_config were both given; give engine, or the settings of a shared one.")
        _split_options({**self._options(), **self.model_kwargs})
        if self.metrics_port is not None:
            self._engine(None)  # the families exist once an engine does
            serve_metrics(self.metrics_port)
        return self

    def stats(self) -> Any:
        """The engine's counters (`AsyncEngine.stats`); starts the shared engine if no call did."""
        return self._engine(None).stats()

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` under the model's own tokenizer."""
        return _require_text(self._engine(None)).encode(text, add_special_tokens=False)

    def served_name(self, model: str | None = None) -> str:
        """The name in metadata and traces; asks no engine, so that none is started for it."""
        return model or self.model_name or (EMBEDDED_NAME if self.engine is None else self.engine.info.model_names[0])

    def _engine(self, model: str | None) -> AsyncEngine:
        name = model or self.model_name
        if self.engine is None:
            return shared_engine(_config(self.engine_config, name))
        engine: AsyncEngine = self.engine
        if name is not None and name not in engine.info.model_names:
            raise ModelNotFoundError(f"The engine does not serve {name!r}; it serves {', '.join(engine.info.model_names)}.", param="model")
        return engine

    def _options(self) -> dict[str, Any]:
        """The options that were set on the model itself, by SamplingParams name."""
        names = ("temperature", "top_p", "top_k", "seed", "n", "stop")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "max_tokens": self.max_tokens}

    def _call(self, stop: list[str] | None, options: Mapping[str, Any], *, is_chat: bool) -> Call:
        """One call's request: the model's fields, then `model_kwargs`, then the call's own options."""
        merged = {**self._options(), **self.model_kwargs, **options}
        model = merged.pop("model", None)
        merged.pop("stream", None)  # only steers LangChain's own choice between _generate and _stream
        if stop is not None:
            merged["stop"] = stop
        params, context = _split_options(merged)
        engine = self._engine(model)
        text = _require_text(engine) if is_chat else engine.text
        return Call(engine=engine, text=text, params=params, context=context, is_chat=is_chat, model_name=self.served_name(model))


def _config(config: EngineConfig | Mapping[str, Any] | None, model: str | None) -> EngineConfig:
    base = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config or {})
    return base if model is None else base.replace(model=model)


def _require_text(engine: AsyncEngine) -> TextFront:
    if engine.text is None:
        raise UnsupportedFeatureError("The engine has no tokenizer (skip_tokenizer_init=True); LangChain models need text.")
    return engine.text


def _split_options(options: Mapping[str, Any]) -> tuple[SamplingParams, RequestContext]:
    """Raises `UnsupportedFeatureError` or `InvalidRequestError` for an option that would be ignored."""
    known = _SAMPLING_FIELDS | _CONTEXT_FIELDS
    for name in options:
        if name in _NOT_OFFERED:
            raise UnsupportedFeatureError(f"{name} is not offered by the LangChain models of this version; remove it.", param=name)
        if name not in known:
            raise InvalidRequestError(f"There is no option {name!r}; the options are: {', '.join(sorted(known))}.", param=name)
    params = SamplingParams(**{name: value for name, value in options.items() if name in _SAMPLING_FIELDS})
    context = RequestContext(adapter="langchain", **{name: value for name, value in options.items() if name in _CONTEXT_FIELDS})
    return params, context
