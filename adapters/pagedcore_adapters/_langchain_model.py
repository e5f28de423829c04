"""What `ChatPagedCore` and `PagedCoreLLM` share: fields, the way to an engine, and how a call becomes a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from langchain_core.language_models import LangSmithParams
from pydantic import BaseModel, Field, model_validator

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.client import TextFront
from pagedcore.errors import ConfigError, ModelNotFoundError, UnsupportedFeatureError
from pagedcore.remote.loop import RemoteLoop
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore_adapters._langchain_call import PROVIDER, Call
from pagedcore_adapters._langchain_options import CallOptions, read_options
from pagedcore_adapters.shared_engine import attached_engine, serve_metrics, shared_engine

EMBEDDED_NAME = "SmolLM2-135M-Instruct"


class PagedCoreModel(BaseModel):
    """Fields of both LangChain models. Owns nothing: the engine is the given one, or the shared one of its configuration."""

    is_chat: ClassVar[bool]
    """Prompts are templated text: their special tokens are in it already."""

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
    """Strings that end the text. A call's own `stop` replaces them, as any option of a call does; `stop=[]` is none."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Any other option of a call: fields of SamplingParams, priority, tenant, cache_salt, request_class, user, response_format;
    and, for a chat, those of tools and chat_template_kwargs."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """An `AsyncEngine` to use; None takes the shared one of (model, engine_config), started at the first call."""
    engine_config: Any = Field(default=None, exclude=True, repr=False)
    """Settings of the shared engine: an `EngineConfig` or a mapping of its fields."""
    socket: str | None = None
    """Path of the Unix socket at which `pagedcore engine` runs one, in place of `engine` and `engine_config`. Model objects of one process
    share the connection, made at the first call."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port of 127.0.0.1, from construction on; None serves none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("engine", "engine_config", "socket") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were given; give an engine, the settings of a shared one, or a socket.")
        read_options({**self._options(), **self.model_kwargs}, is_chat=self.is_chat)
        if self.metrics_port is not None:
            _require_own_numbers(self._engine(None))  # the families exist once an engine does
            serve_metrics(self.metrics_port)
        return self

    def __getstate__(self) -> dict[Any, Any]:
        """A pickle holds settings: its copy takes the shared engine of them. Raises `ConfigError` for a model with an engine of its own."""
        if self.engine is not None:
            raise ConfigError("A model that was given an engine cannot be pickled; give it engine_config, the settings of a shared engine.")
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copies share the engine."""
        return super().__deepcopy__({**(memo or {}), id(self.engine): self.engine})

    def stats(self) -> Any:
        """The engine's counters (`AsyncEngine.stats`); starts the shared engine if no call did."""
        return self._engine(None).stats()

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` under the model's own tokenizer."""
        return require_text(self._engine(None)).encode(text, add_special_tokens=False)

    def served_name(self, model: str | None = None) -> str:
        """The name in metadata and traces; starts no engine for it."""
        name = model or self.model_name
        if name is not None:
            return name
        engine = self._running_engine()
        return _name_of(_config(self.engine_config, None)) if engine is None else engine.info.model_names[0]

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: LangChain's caches of answers go by it, so models on different engines must differ."""
        engine = self._running_engine()
        config = _config(self.engine_config, self.model_name) if engine is None else engine.config
        settings = {"engine_config": changed} if (changed := _changed(config)) else {}
        return {"model_name": self.served_name(), **self._options(), **self.model_kwargs, **settings}

    def _named(self, params: LangSmithParams) -> LangSmithParams:
        """The parameters of a trace with whose model it was."""
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", self.served_name())
        return params

    def _running_engine(self) -> AsyncEngine | None:
        """The one that runs whether this model is used or not: given, or at the socket. None where it is of our own making."""
        engine: AsyncEngine | None = self.engine if self.socket is None else attached_engine(self.socket)
        return engine

    def _engine(self, model: str | None) -> AsyncEngine:
        name = model or self.model_name
        engine = self._running_engine()
        if engine is None:
            return shared_engine(_config(self.engine_config, name))
        if name is not None and name not in engine.info.model_names:
            raise ModelNotFoundError(f"The engine does not serve {name!r}; it serves {', '.join(engine.info.model_names)}.", param="model")
        return engine

    def _options(self) -> dict[str, Any]:
        """The options that were set on the model itself, by SamplingParams name."""
        names = ("temperature", "top_p", "top_k", "seed", "n", "stop")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**given, "max_tokens": self.max_tokens}

    def _asked(self, stop: list[str] | None, options: Mapping[str, Any]) -> CallOptions:
        """One call's options: the model's fields, then `model_kwargs`, then the call's own."""
        merged = {**self._options(), **self.model_kwargs, **options}
        merged.pop("stream", None)  # only steers LangChain's own choice between _generate and _stream
        if stop is not None:
            merged["stop"] = stop
        return read_options(merged, is_chat=self.is_chat)

    def _call(self, engine: AsyncEngine, asked: CallOptions, form: StructuredOutputsParams | None) -> Call:
        return Call(
            engine=engine,
            params=asked.params.replace(structured_outputs=form),
            context=asked.context,
            is_chat=self.is_chat,
            model_name=self.served_name(asked.model),
        )


def _config(config: EngineConfig | Mapping[str, Any] | None, model: str | None) -> EngineConfig:
    base = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config or {})
    return base if model is None else base.replace(model=model)


def _name_of(config: EngineConfig) -> str:
    """The name that an engine of these settings answers with."""
    names = config.served_model_name
    first = names if isinstance(names, str) or names is None else names[0]
    return first or config.model or EMBEDDED_NAME


def _changed(config: EngineConfig) -> dict[str, Any]:
    """Settings that are not the defaults."""
    usual = EngineConfig()
    return {field.name: value for field in fields(config) if (value := getattr(config, field.name)) != getattr(usual, field.name)}


def _require_own_numbers(engine: AsyncEngine) -> None:
    """Raises `ConfigError` for an engine whose numbers are in another process."""
    if isinstance(engine.loop, RemoteLoop) and not engine.loop.writes_numbers:
        raise ConfigError(
            "metrics_port serves this process' numbers, and those of an engine at a socket are in its own: scrape the /metrics of "
            "`pagedcore serve --socket`, or read `engine.metrics_text()`."
        )


def require_text(engine: AsyncEngine) -> TextFront:
    """The engine's tokenizer. Raises `UnsupportedFeatureError` where it has none."""
    if engine.text is None:
        raise UnsupportedFeatureError("The engine has no tokenizer (skip_tokenizer_init=True); LangChain models need text.")
    return engine.text
