"""What the HTTP front needs to know beside the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from pagedcore.console.indicators import Targets
from pagedcore.errors import ConfigError
from pagedcore.http.cross_origin import check_origins
from pagedcore.openai.bodies import ChatBody, CompletionBody
from pagedcore.shown import shown
from pagedcore.tools.forms import FORMS, FormName

AdapterName = Literal["litserve", "bentoml", "langchain", "library"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the OpenAI routes. Raises `ConfigError` naming value and limit."""

    api_keys: tuple[str, ...] = ()
    """Keys that clients may use; with none here and in `tenants` the server is open."""
    tenants: Mapping[str, str] = field(default_factory=dict)
    """API key -> tenant. A key of this map is valid too. The body's `user` never names a tenant: it is only in the request log."""
    tenant_of: Callable[[Request], str | None] | None = None
    """The host's own code, in place of `tenants`: whose request it is, after the key was checked; None is the operator."""
    tenant_priorities: Mapping[str, int] = field(default_factory=dict)
    """Tenant -> the priority of its requests, lower first, for an engine with scheduling_policy="priority"; 0 for tenants not named here,
    and "" names requests without a tenant. With any, no client gives its own: `priority` in a body is refused, or left out where
    `ignored_fields` names it."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of generation bodies that are taken and left out, though they ask for what is not offered or are unknown here.

    The log and the reply's X-Ignored-Fields name those that came. All other such fields are refused.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins, such as https://example.org, whose web pages may call this server from a browser (CORS), also with cookies; ("*",) is every
    origin, without cookies and without the operators' routes. None by default.
    """
    max_request_bytes: int = 32 * 2**20
    """Larger bodies are refused with HTTP 413."""
    inline_request_bytes: int = 16 * 2**10
    """Larger bodies are parsed, templated and tokenized in a worker thread, so that the event loop never stalls."""
    max_choices: int = 1024
    """Most choices (prompts times n) of one request."""
    retry_after_s: float = 5.0
    """Retry-After of /ready and /health while they answer 503."""
    allow_operator_routes: bool = True
    """Serve /metrics, /v1/stats, /v1/cache/..., /v1/requests, /v1/trace and /ui. False where the port is public."""
    serve_metrics: bool = True
    """Serve /metrics among them. False where the host serves it."""
    ui_show_text: bool = False
    """Let the live page show how prompts begin and where they left the cached ones."""
    targets: Targets = field(default_factory=Targets)
    """What the indicators of the live page are judged by."""
    adapter: AdapterName = "library"
    """The host framework, as the `adapter` label on metrics."""
    tool_parser: FormName = "auto"
    """How the model writes calls of tools; "auto" reads it off the chat template."""
    response_role: str = "assistant"
    """Role of the messages that chat completions answer with."""

    def __post_init__(self) -> None:
        for name in ("max_request_bytes", "max_choices", "inline_request_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r} and must be an integer of at least 1.")
        if self.tool_parser not in ("auto", *FORMS):
            raise ConfigError(f"tool_parser is {self.tool_parser!r} and must be one of auto, {', '.join(FORMS)}.")
        if not self.retry_after_s > 0:
            raise ConfigError(f"retry_after_s is {self.retry_after_s!r} and must be above 0.")
        self._check_tenant_priorities()
        check_origins(self.cors_origins)
        fields = {*ChatBody.model_fields, *CompletionBody.model_fields} - ({"priority"} if self.tenant_priorities else set())
        obeyed = sorted(fields.intersection(self.ignored_fields))
        if obeyed:
            raise ConfigError(f"ignored_fields holds {', '.join(obeyed)}, which this server obeys; name only fields that it would refuse.")
        api_keys: object = self.api_keys
        if not isinstance(api_keys, tuple) or not all(isinstance(key, str) and key for key in (*api_keys, *self.tenants)):
            raise ConfigError("api_keys must be a tuple of non-empty strings, and so must the keys of tenants.")

    def _check_tenant_priorities(self) -> None:
        unknown = self.tenant_priorities.keys() - {"", *self.tenants.values()}
        if unknown and self.tenant_of is None:
            raise ConfigError(f"tenant_priorities names {shown(min(unknown))}, and no key in tenants is theirs; give the tenant a key.")
        for tenant, priority in self.tenant_priorities.items():
            if type(priority) is not int or not -(2**31) <= priority < 2**31:
                raise ConfigError(f"The priority of the tenant {shown(tenant)} is {shown(priority)} and must be a 32-bit integer.")
