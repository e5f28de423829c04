"""The bodies of the native BentoML methods: read and refused as those of OpenAI's routes are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_type_hints

import bentoml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request

from pagedcore import SamplingParams
from pagedcore.client import EngineClient
from pagedcore.commands.field_docs import field_docs
from pagedcore.errors import UnsupportedFeatureError
from pagedcore.http.json_bodies import invalid_field, json_object
from pagedcore.openai import ServerSettings
from pagedcore.openai.service import OpenAIService
from pagedcore.tools.fields import check_fields

BETWEEN_SERVICES = "application/vnd.bentoml+pickle"
"""Type of the bodies by which BentoML's services call each other; BentoML itself takes none from outside."""

NOT_ANSWERED = ("n", "logprobs", "prompt_logprobs", "detokenize")
"""Settings whose results a `Reply` has no place for."""

_AS_CLIENTS_SEND_IT: dict[str, Any] = {
    "stop": str | list[str],
    "bad_words": str | list[str],
    "stop_token_ids": list[int],
    "structured_outputs": dict[str, Any] | None,
}
"""Types for which BentoML's client leaves a value as it is; it would split the text of a list's field and drop unknown keys."""


class NativeBody(bentoml.IODescriptor):
    """A body of one field that is no setting, the first one, and of the fields of `SamplingParams` that a `Reply` can answer."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Any:
        """What BentoML calls a method with: nothing is read yet but what comes from another service."""
        if serde.media_type == BETWEEN_SERVICES:
            return await super().from_http_request(request, serde)
        first, *settings = cls.model_fields
        return cls.model_construct(**{first: Unread(request, cls)}, **dict.fromkeys(settings))

    @classmethod
    def read(cls, raw: bytes, client: EngineClient, settings: ServerSettings) -> Self:
        """A `Reader`. A value of null is the field's default. Raises `RequestError` for all that is wrong."""
        data = json_object(raw)
        check_names(data, cls.model_fields)
        try:
            return cls.model_validate({name: value for name, value in data.items() if value is not None})
        except ValidationError as error:
            raise invalid_field(error) from None


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for the first field of a body until the method, which knows the keys and the limits, reads it."""

    request: Request
    kind: type[NativeBody]

    async def read(self, access: OpenAIService) -> tuple[str | list[ChatMessage], dict[str, Any]]:
        """The first field, and the others by name. Raises `RequestError`."""
        body = await access.read(self.request, self.kind.read)
        first, *settings = self.kind.model_fields
        return getattr(body, first), {name: getattr(body, name) for name in settings}


class ChatMessage(BaseModel):
    """One message of a conversation; a caller in this process may give a dict."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `UnsupportedFeatureError` or `InvalidRequestError` for a name that is none of `known`."""
    for name in given:
        if name in NOT_ANSWERED:
            raise UnsupportedFeatureError(f"{name} is not offered here; /v1/completions offers what OpenAI's API has.", param=name)
    check_fields(dict.fromkeys(given), known=known, not_offered={})


def _sampling_fields() -> dict[str, Any]:
    """The fields of `SamplingParams` that a `Reply` can answer, for `create_model`."""
    hints = get_type_hints(SamplingParams) | _AS_CLIENTS_SEND_IT
    docs, unset = field_docs(SamplingParams), SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in NOT_ANSWERED]
    return {name: (hints[name], Field(_as_json(getattr(unset, name)), description=docs[name])) for name in names}


def _as_json(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


GenerateBody = create_model("GenerateBody", __base__=NativeBody, prompt=(str, ...), **_sampling_fields())
ChatBody = create_model("ChatBody", __base__=NativeBody, messages=(list[ChatMessage], ...), **_sampling_fields())
