"""The one way that every front (router, adapters, CLI) reaches an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pagedcore.errors import InvalidRequestError
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.shown import shortened, shown
from pagedcore.traceparent import parse_traceparent

MAX_USER_CHARS = 256
"""Of the name of a user that logs and histories keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a front must know of the served model."""

    model_names: tuple[str, ...]
    """The names that clients may use, the main one first."""
    max_model_len: int
    created_s: int
    """Unix time."""
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    max_waiting_requests: int | None = None
    seed: int = 0
    """Seeds the draw of the seeds of unseeded requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Who asks, and how urgent it is; beside the sampling parameters. Raises `InvalidRequestError` naming the field."""

    priority: int = 0
    """Lower goes first under scheduling_policy="priority"."""
    tenant: str | None = None
    cache_salt: str | None = None
    request_class: str | None = None
    user: str | None = None
    """Whom the caller names, for the log of requests: no answer, quota or cache depends on it."""
    adapter: str = "library"
    traceparent: str | None = None
    """The caller's span, as a W3C `traceparent`; None is the current OpenTelemetry span, if there is one."""

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise InvalidRequestError(f"priority must be an integer, got {shown(self.priority)}.", param="priority")
        for name in ("tenant", "cache_salt", "request_class", "user", "adapter"):
            value = getattr(self, name)
            if value is not None or name == "adapter":
                check_text(value, name)
        if self.traceparent is not None and not (isinstance(self.traceparent, str) and parse_traceparent(self.traceparent)):
            message = f"traceparent is {shown(self.traceparent)} and must be a W3C traceparent, such as 00-TRACE_ID-SPAN_ID-01."
            raise InvalidRequestError(message, param="traceparent")

    def in_trace(self, header: str | None) -> RequestContext:
        """The same under the caller's span; a header that is no valid `traceparent` is ignored, as its standard says."""
        return self if header is None or parse_traceparent(header) is None else replace(self, traceparent=header)


def named_user(user: str | None, safety_identifier: str | None) -> str | None:
    """Whom a client names, by OpenAI's older field or the one that replaces it; cut, with a mark, to what a line of a log may hold."""
    name = user or safety_identifier
    return shortened(name, MAX_USER_CHARS) if name else None


def check_text(value: object, name: str) -> None:
    """Raises `InvalidRequestError` for what is no text, or none that UTF-8 has a form for: no scrape and no page could show it."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be text, got {shown(value)}.", param=name)
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidRequestError(f"{name} is {shown(value)}, which holds half a surrogate pair; give valid Unicode text.", param=name)


class TextFront(Protocol):
    """Text in, token ids out; implemented by `pagedcore.text.tokenizer.Tokenizer`. All methods are thread-safe."""

    def encode(self, text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None) -> list[int]:
        """Token ids; of a text with more than `max_prompt_tokens` not always all, but more than that."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """Apply the chat template (generation prompt added unless add_generation_prompt=False is given).
        Raises `InvalidRequestError` without a template or when the template refuses the messages."""
        ...

    def chat_template(self, *, with_tools: bool) -> str | None:
        """The text of the template that conversations, or those with tools, are rendered by; None where there is none."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """One token as bytes, for logprobs."""
        ...


class EngineClient(Protocol):
    """An engine as a front sees it. `AsyncEngine` is one; the LitServe API process has another, over queues."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def text(self) -> TextFront | None:
        """None with skip_tokenizer_init."""
        ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request: cumulative outputs, the last one finished. Leaving the loop early aborts it.

        Raises `RequestError` where the call itself is malformed and `EngineClosedError` where no engine takes it. What the
        engine refuses or fails later comes as one last output with status "rejected" or "error" and its typed `error`.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def is_ready(self) -> bool:
        """Loaded, warmed up and not draining."""
        ...

    async def is_alive(self) -> bool:
        """The engine loop runs (it may be busy)."""
        ...

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """Prometheus exposition and its content type: OpenMetrics where `accept` (a header) asks for it and one process is all."""
        ...

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        """What an operator asks: one JSON-able answer an engine, empty where that engine knows nothing of what was asked.

        The questions are those of `pagedcore.console.inspector`. Raises `InvalidRequestError` for another one,
        `EngineClosedError` when an engine is gone and `NoAnswerError` when one does not answer in time.
        """
        ...
