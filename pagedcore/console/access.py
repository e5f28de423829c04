"""Who asks an operator's question, and what he may see."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from pagedcore.errors import OperatorOnlyError
from pagedcore.openai.service import OpenAIService


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever has a key without a tenant, or talks to an open server, is the operator; a tenant asks about himself only."""

    tenant: str | None

    @property
    def is_operator(self) -> bool:
        return self.tenant is None


def caller_of(service: OpenAIService, request: Request) -> Caller:
    """Raises `AuthenticationError` without a valid key where one is needed."""
    return Caller(service.tenant(request))


def check_operator(service: OpenAIService, request: Request) -> None:
    """Raises `AuthenticationError` without a valid key where one is needed, and `OperatorOnlyError` for a tenant's key."""
    if not caller_of(service, request).is_operator:
        raise OperatorOnlyError("This key belongs to a tenant and the question concerns all of them; ask with a key of api_keys.")
