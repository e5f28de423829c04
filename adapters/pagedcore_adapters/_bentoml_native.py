"""The typed API of the BentoML service: `generate`, `chat` and their streams, beside OpenAI's routes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, cast, get_type_hints

import bentoml
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pagedcore import AsyncEngine, RequestOutput, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.commands.field_docs import field_docs
from pagedcore.errors import EngineError, PagedCoreError, UnsupportedFeatureError
from pagedcore.http.event_stream import until_disconnect
from pagedcore.openai.calls import required_text
from pagedcore.openai.service import OpenAIService
from pagedcore.outputs import FinishReason
from pagedcore_adapters._bentoml_errors import note_error

IN_PROCESS = cast("bentoml.Context", None)
"""BentoML gives a context to a call that comes by HTTP; a caller in this process gives none."""

NOT_ANSWERED = ("n", "logprobs", "prompt_logprobs", "detokenize")
"""Settings whose results a `Reply` has no place for."""

_AS_CLIENTS_SEND_IT: dict[str, Any] = {
    "stop": str | list[str],
    "bad_words": str | list[str],
    "stop_token_ids": list[int],
    "structured_outputs": dict[str, Any] | None,
}
"""Types for which BentoML's client leaves a value as it is; it would split the text of a list's field and drop unknown keys."""

Ask = Callable[[], AsyncIterator[RequestOutput]]


class ChatMessage(BaseModel):
    """One message of a conversation; a caller in this process may give a dict."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str


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


def _sampling_fields() -> dict[str, Any]:
    """The fields of `SamplingParams` that a `Reply` can answer, for `create_model`."""
    hints = get_type_hints(SamplingParams) | _AS_CLIENTS_SEND_IT
    docs, unset = field_docs(SamplingParams), SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in NOT_ANSWERED]
    return {name: (hints[name], Field(_as_json(getattr(unset, name)), description=docs[name])) for name in names}


def _as_json(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


GenerateBody = create_model("GenerateBody", __config__=ConfigDict(extra="forbid"), prompt=(str, ...), **_sampling_fields())
ChatBody = create_model("ChatBody", __config__=ConfigDict(extra="forbid"), messages=(list[ChatMessage], ...), **_sampling_fields())


class NativeAPI:
    """The API methods, each of whose `sampling` is fields of `SamplingParams`. The service that inherits them sets what they use."""

    engine: AsyncEngine
    access: OpenAIService
    """Knows the API keys."""

    @bentoml.api(input_spec=GenerateBody)
    async def generate(self, prompt: str, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> Reply:
        """Continue a text."""
        return await _whole(ctx, partial(self._ask, ctx, prompt, sampling))

    @bentoml.api(input_spec=GenerateBody)
    async def generate_stream(self, prompt: str, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> AsyncGenerator[str, None]:
        """Continue a text, piece by piece."""
        async with aclosing(_pieces(ctx, partial(self._ask, ctx, prompt, sampling))) as pieces:
            async for piece in pieces:
                yield piece

    @bentoml.api(input_spec=ChatBody)
    async def chat(self, messages: Messages, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> Reply:
        """Answer a conversation."""
        return await _whole(ctx, partial(self._ask, ctx, messages, sampling))

    @bentoml.api(input_spec=ChatBody)
    async def chat_stream(self, messages: Messages, *, ctx: bentoml.Context = IN_PROCESS, **sampling: Any) -> AsyncGenerator[str, None]:
        """Answer a conversation, piece by piece."""
        async with aclosing(_pieces(ctx, partial(self._ask, ctx, messages, sampling))) as pieces:
            async for piece in pieces:
                yield piece

    async def is_ready(self) -> bool:
        """For a service that depends on this one in process; BentoML's proxy of a remote one has the same method."""
        return await self.engine.is_ready()

    def _ask(self, ctx: bentoml.Context, prompt: str | Messages, sampling: dict[str, Any]) -> AsyncIterator[RequestOutput]:
        """Raises `AuthenticationError` for a call by HTTP without a valid key, and `RequestError` for what cannot be answered."""
        context = RequestContext(adapter="bentoml")
        if ctx is not IN_PROCESS:
            tenant = self.access.tenant(ctx.request)
            context = RequestContext(adapter="bentoml", tenant=tenant, priority=self.access.priority(tenant))
            context = context.in_trace(ctx.request.headers.get("traceparent"))
        params = _params(sampling)
        if isinstance(prompt, str):
            return self.engine.generate(prompt, params, context=context)
        messages = [message.model_dump() if isinstance(message, ChatMessage) else message for message in prompt]
        rendered = required_text(self.engine.text, "messages").render_chat(messages)
        return self.engine.generate(rendered, params, context=context, add_special_tokens=False)  # the template wrote them


def _params(sampling: dict[str, Any]) -> SamplingParams:
    """Raises `UnsupportedFeatureError` for a name that the methods do not take, and `InvalidRequestError` for a value."""
    for name in sampling:
        if name not in GenerateBody.model_fields:
            raise UnsupportedFeatureError(f"{name} is not offered here; /v1/completions offers what OpenAI's API has.", param=name)
    return SamplingParams(**sampling)


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


async def _whole(ctx: bentoml.Context, ask: Ask) -> Reply:
    """The reply; a client of HTTP that leaves aborts it. In process its error is raised."""
    if ctx is IN_PROCESS:
        return await _last(ask)
    try:
        return await until_disconnect(ctx.request.receive, _last(ask))
    except PagedCoreError as error:
        note_error(ctx.request, error)
    except ClientDisconnect:
        pass  # nobody reads what comes now
    return cast("Reply", Response(status_code=499))


async def _pieces(ctx: bentoml.Context, ask: Ask) -> AsyncGenerator[str, None]:
    """What is new at each step. A stream that does not come to its end breaks, in process by raising."""
    try:
        async with aclosing(_outputs(ask)) as outputs:
            async for output in outputs:
                if output.text:
                    yield output.text
        if output.outputs[0].finish_reason == "abort":
            raise EngineError("The request was aborted before its end.")
    except PagedCoreError as error:
        if ctx is IN_PROCESS:
            raise
        note_error(ctx.request, error)
