"""The typed API of the BentoML service: `generate`, `chat` and their streams, beside OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import bentoml
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pagedcore import AsyncEngine, RequestOutput, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import EngineError, PagedCoreError
from pagedcore.http.event_stream import until_disconnect
from pagedcore.openai.calls import required_text
from pagedcore.openai.service import OpenAIService
from pagedcore.outputs import FinishReason
from pagedcore.tools.messages import TemplateArguments, render
from pagedcore_adapters._bentoml_bodies import ChatBody, ChatMessage, GenerateBody, Unread, check_names
from pagedcore_adapters._bentoml_errors import note_error

IN_PROCESS = cast("bentoml.Context", None)
"""BentoML gives a context to a call that comes by HTTP; a caller in this process gives none."""

Ask = Callable[[], AsyncIterator[RequestOutput]]
Asking = Callable[[], Awaitable[Ask]]

Messages = Sequence[ChatMessage | dict[str, str]]


class Reply(BaseModel):
    """A whole answer, and what it took."""

    request_id: str
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    num_output_tokens: int


class NativeAPI:
    """The API methods, each of whose `sampling` is fields of `SamplingParams`. The service that inherits them sets what they use."""

    engine: AsyncEngine
    access: OpenAIService
    """Knows the API keys."""

    @bentoml.api(input_spec=GenerateBody)
    async def generate(self, prompt: str, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> Reply:
        """Continue a text."""
        return await _whole(ctx, partial(self._asked, ctx, prompt, sampling))

    @bentoml.api(input_spec=GenerateBody)
    async def generate_stream(self, prompt: str, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> AsyncGenerator[str, None]:
        """Continue a text, piece by piece."""
        async with aclosing(_pieces(ctx, partial(self._asked, ctx, prompt, sampling))) as pieces:
            async for piece in pieces:
                yield piece

    @bentoml.api(input_spec=ChatBody)
    async def chat(self, messages: Messages, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> Reply:
        """Answer a conversation."""
        return await _whole(ctx, partial(self._asked, ctx, messages, sampling))

    @bentoml.api(input_spec=ChatBody)
    async def chat_stream(self, messages: Messages, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> AsyncGenerator[str, None]:
        """Answer a conversation, piece by piece."""
        async with aclosing(_pieces(ctx, partial(self._asked, ctx, messages, sampling))) as pieces:
            async for piece in pieces:
                yield piece

    async def is_ready(self) -> bool:
        """For a service that depends on this one in process; BentoML's proxy of a remote one has the same method."""
        return await self.engine.is_ready()

    async def _asked(self, ctx: bentoml.Context, prompt: str | Messages | Unread, sampling: dict[str, Any]) -> Ask:
        """Raises `AuthenticationError` for a call by HTTP without a valid key, and `RequestError` for what cannot be answered."""
        context = RequestContext(adapter="bentoml")
        if ctx is not IN_PROCESS:
            tenant = self.access.tenant(ctx.request)
            context = RequestContext(adapter="bentoml", tenant=tenant, priority=self.access.priority(tenant))
            context = context.in_trace(ctx.request.headers.get("traceparent"))
        if isinstance(prompt, Unread):
            prompt, sampling = await prompt.read(self.access)
        check_names(sampling, GenerateBody.model_fields)
        params = SamplingParams(**sampling)
        if isinstance(prompt, str):
            return partial(self.engine.generate, prompt, params, context=context)
        messages = [message.model_dump() if isinstance(message, ChatMessage) else message for message in prompt]
        rendered = render(TemplateArguments(), messages, required_text(self.engine.text, "messages"))
        return partial(self.engine.generate, rendered, params, context=context, add_special_tokens=False)  # the template wrote them


async def _outputs(ask: Ask) -> AsyncGenerator[RequestOutput, None]:
    """Raises the error of a request that is refused or fails. Closing it aborts what still runs."""
    stream = ask()
    try:
        async for output in stream:
            if output.error is not None:
                raise output.error
            yield output
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


async def _last(ask: Ask) -> Reply:
    async with aclosing(_outputs(ask)) as outputs:
        last = [output async for output in outputs][-1]
    (choice,) = last.outputs
    return Reply(
        request_id=last.request_id,
        text=choice.text,
        finish_reason=choice.finish_reason,
        num_prompt_tokens=len(last.prompt_token_ids),
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=len(choice.token_ids),
    )


async def _whole(ctx: bentoml.Context, asking: Asking) -> Reply:
    """The reply; a client of HTTP that leaves aborts it. In process its error is raised."""
    if ctx is IN_PROCESS:
        return await _last(await asking())
    try:
        ask = await asking()  # the body is read before anybody waits for a disconnect, which comes by the same way
        return await until_disconnect(ctx.request.receive, _last(ask))
    except PagedCoreError as error:
        note_error(ctx.request, error)
    except ClientDisconnect:
        pass  # nobody reads what comes now
    return cast("Reply", Response(status_code=499))


async def _pieces(ctx: bentoml.Context, asking: Asking) -> AsyncGenerator[str, None]:
    """What is new at each step. A stream that does not come to its end breaks, in process by raising."""
    try:
        async with aclosing(_outputs(await asking())) as outputs:
            async for output in outputs:
                if output.text:
                    yield output.text
        if output.outputs[0].finish_reason == "abort":
            raise EngineError("The request was aborted before its end.")
    except PagedCoreError as error:
        if ctx is IN_PROCESS:
            raise
        note_error(ctx.request, error)
