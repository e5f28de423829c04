"""`ChatPagedCore`: the engine as a LangChain chat model, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn

from pagedcore_adapters._extras import missing_extra

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
except ImportError as error:
    raise missing_extra("langchain_core", "langchain", error) from error
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
from pydantic import ConfigDict

from pagedcore import CompletionOutput, RequestOutput
from pagedcore.errors import UnsupportedFeatureError
from pagedcore_adapters._langchain_call import MAX_BATCH_THREADS, PROVIDER, Call, usage
from pagedcore_adapters._langchain_messages import chat_message
from pagedcore_adapters._langchain_model import PagedCoreModel
from pagedcore_adapters.langchain_llm import PagedCoreLLM

__all__ = ["ChatPagedCore", "PagedCoreLLM"]


class ChatPagedCore(PagedCoreModel, BaseChatModel):
    """Chat over a pagedcore engine: native sync and async, streaming, `batch` in one engine batch.

    `ChatPagedCore()` alone runs the embedded model on an engine that every model object of the same configuration shares.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    streaming: bool = False
    """True makes invoke stream inside, so that token callbacks fire."""

    @property
    def _llm_type(self) -> str:
        return "pagedcore-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.served_name(), **self._options(), **self.model_kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        params.setdefault("ls_model_name", self.served_name())
        return params

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As every Runnable's, but all inputs are in the engine at once unless the config sets max_concurrency."""
        configs = get_config_list(config, len(inputs))
        if configs and configs[0].get("max_concurrency") is None:
            configs = [{**c, "max_concurrency": min(len(inputs), MAX_BATCH_THREADS)} for c in configs]
        return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def generate(self, messages: list[list[BaseMessage]], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """As BaseChatModel's, but all conversations are in the engine at once."""
        if len(messages) < 2 or kwargs.get("run_id") is not None:
            return super().generate(messages, stop, *args, **kwargs)
        inner = super().generate
        with ContextThreadPoolExecutor(max_workers=min(len(messages), MAX_BATCH_THREADS)) as pool:
            results = list(pool.map(lambda conversation: inner([conversation], stop, *args, **kwargs), messages))
        run = [info for result in results for info in result.run or []]
        return LLMResult(generations=[result.generations[0] for result in results], llm_output=results[0].llm_output, run=run or None)

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: str | None = None, **kwargs: Any) -> NoReturn:
        """Refused: raises `UnsupportedFeatureError`."""
        raise UnsupportedFeatureError("Tool calling is not offered by this version; call the model without bind_tools.", param="tools")

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> NoReturn:
        """Refused: raises `UnsupportedFeatureError`."""
        raise UnsupportedFeatureError(
            "Structured output is not offered by this version; ask for JSON in the prompt and parse the text.", param="response_format"
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs, is_chat=True)
        return _result(call, call.collect(_prompt(call, messages)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs, is_chat=True)
        return _result(call, await call.acollect(_prompt(call, messages)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs, is_chat=True)
        with closing(call.stream(_prompt(call, messages))) as outputs:
            for output in outputs:
                chunk = _chunk(call, output)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs, is_chat=True)
        async with aclosing(call.astream(_prompt(call, messages))) as outputs:
            async for output in outputs:
                chunk = _chunk(call, output)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


def _prompt(call: Call, messages: list[BaseMessage]) -> str:
    assert call.text is not None, "a chat call has a tokenizer"
    return call.text.render_chat([chat_message(message) for message in messages])


def _message(call: Call, output: RequestOutput, choice: CompletionOutput) -> AIMessage:
    return AIMessage(content=choice.text, usage_metadata=usage(output), response_metadata=call.metadata(output, choice.index))


def _result(call: Call, output: RequestOutput) -> ChatResult:
    generations = [
        ChatGeneration(message=_message(call, output, choice), generation_info={"finish_reason": choice.finish_reason})
        for choice in output.outputs
    ]
    return ChatResult(generations=generations, llm_output={"model_name": call.model_name})


def _chunk(call: Call, output: RequestOutput) -> ChatGenerationChunk:
    if not output.finished:
        return ChatGenerationChunk(message=AIMessageChunk(content=output.text))
    message = AIMessageChunk(
        content=output.text, usage_metadata=usage(output), response_metadata=call.metadata(output), chunk_position="last"
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": output.outputs[0].finish_reason})
