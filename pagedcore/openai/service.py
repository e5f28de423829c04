"""What stands behind the routes: reading, checking and answering one HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from pagedcore.client import EngineClient, RequestContext, named_user
from pagedcore.errors import EngineError, InvalidRequestError, PagedCoreError
from pagedcore.http.api_keys import ApiKeys
from pagedcore.http.event_stream import DONE, EventStream, sse_error, until_disconnect
from pagedcore.http.json_text import json_reply
from pagedcore.http.request_body import read_body
from pagedcore.http.request_class import request_class_of
from pagedcore.http.request_ids import adopt_request_id
from pagedcore.openai.bodies import GenerationBody
from pagedcore.openai.calls import Call
from pagedcore.openai.errors import body_of
from pagedcore.openai.replies import REPLIES, Reply
from pagedcore.openai.settings import ServerSettings
from pagedcore.openai.streams import IndexedOutput, run_call
from pagedcore.shown import shown

T = TypeVar("T")
Reader = Callable[[bytes, EngineClient, ServerSettings], T]
"""A pure function from the body of a request to what it asks for."""

ClientOrGetter = EngineClient | Callable[[], EngineClient]

IGNORED_FIELDS_HEADER = "X-Ignored-Fields"

logger = logging.getLogger("pagedcore.openai")


class OpenAIService:
    """Owns its settings and the way to the engine."""

    def __init__(self, client: ClientOrGetter, settings: ServerSettings) -> None:
        self._client = client
        self.settings = settings
        self._keys = ApiKeys(settings.api_keys, settings.tenants)

    @property
    def client(self) -> EngineClient:
        """The engine; asked for anew each time, since a host may create it after the routes."""
        if hasattr(self._client, "generate"):
            return cast("EngineClient", self._client)
        return self._client()

    def tenant(self, request: Request) -> str | None:
        """Whose request it is. Raises `AuthenticationError` without a valid key where one is needed."""
        tenant = self._keys.tenant_of(request.headers.get("Authorization"))
        return tenant if self.settings.tenant_of is None else self.settings.tenant_of(request)

    def priority(self, tenant: str | None, body: GenerationBody | None = None) -> int:
        """The priority of a request of this tenant: the host's where it has given any, else the body's.

        Raises `InvalidRequestError` for a body that gives its own where the host does.
        """
        if not self.settings.tenant_priorities:
            return 0 if body is None else body.priority
        if body is not None and "priority" in body.model_fields_set:
            raise InvalidRequestError(f"priority is {body.priority}, and this server sets it by tenant; leave it out.", param="priority")
        return self.settings.tenant_priorities.get(tenant or "", 0)

    async def read(self, request: Request, reader: Reader[T]) -> T:
        """Read and check a body, off the event loop when it is large. Raises `RequestError`."""
        raw = await read_body(request, self.settings.max_request_bytes)
        if len(raw) > self.settings.inline_request_bytes:
            return await asyncio.to_thread(reader, raw, self.client, self.settings)
        return reader(raw, self.client, self.settings)

    async def answer(self, request: Request, reader: Reader[dict[str, object]]) -> Response:
        """Answer a request that needs no generation."""
        self.tenant(request)
        return json_reply(await self.read(request, reader))

    async def generate(self, request: Request, reader: Reader[Call]) -> Response:
        """Answer a request for generation. What fails before the first output raises; later, a stream carries the error."""
        caller = RequestContext(tenant=self.tenant(request), request_class=request_class_of(request), adapter=self.settings.adapter)
        call = await self.read(request, reader)
        request_id = adopt_request_id(request, call.body.request_id)
        tenant, user = caller.tenant, named_user(call.body.user, call.body.safety_identifier)
        logger.info("request %s: model %r, tenant %r, class %r, user %s", request_id, call.model, tenant, caller.request_class, shown(user))
        client = self.client
        reply = REPLIES[call.endpoint](call, request_id, client.text, self.settings.response_role)
        context = replace(caller, priority=self.priority(tenant, call.body), cache_salt=call.body.cache_salt, user=user)
        outputs = run_call(client, call, request_id, context.in_trace(request.headers.get("traceparent")))
        response = await _respond(request, reply, outputs)
        if call.body.ignored:
            logger.info("request %s: %s left out, as ignored_fields says", request_id, ", ".join(call.body.ignored))
            response.headers[IGNORED_FIELDS_HEADER] = ", ".join(call.body.ignored)
        return response


async def _respond(request: Request, reply: Reply, outputs: AsyncGenerator[IndexedOutput, None]) -> Response:
    if not reply.call.body.stream:
        return json_reply(await until_disconnect(request.receive, _whole(reply, outputs)))
    first = await until_disconnect(request.receive, anext(outputs, None))
    if first is None:
        raise EngineError("The engine gave no output.")
    return EventStream(_events(reply, first, outputs))


async def _whole(reply: Reply, outputs: AsyncGenerator[IndexedOutput, None]) -> dict[str, object]:
    async with aclosing(outputs):
        latest = {index: output async for index, output in outputs}
    body = reply.whole([latest[index] for index in sorted(latest)])
    reply.check_ended()
    return body


async def _events(reply: Reply, first: IndexedOutput, outputs: AsyncGenerator[IndexedOutput, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(outputs):
        try:
            yield reply.opening() + reply.events(*first)
            async for indexed in outputs:
                if events := reply.events(*indexed):
                    yield events
            reply.check_ended()
        except PagedCoreError as error:
            logger.warning("request %s: its stream ended with an error: %s", reply.request_id, error)
            yield sse_error(body_of(error))
            return
    yield (reply.usage_event() if reply.call.body.stream_options.include_usage else b"") + DONE
