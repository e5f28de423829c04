"""`ChatPagedCore`: the engine as a LangChain chat model, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar

from pagedcore_adapters._extras import missing_extra

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
except ImportError as error:
    raise missing_extra("langchain_core", "langchain", error) from error
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict

from pagedcore.tools.answer import plan_answer
from pagedcore.tools.forms import FormName
from pagedcore_adapters._langchain_answer import Chat, make_prompt
from pagedcore_adapters._langchain_batch import batch, batch_as_completed, run_at_once
from pagedcore_adapters._langchain_model import PagedCoreModel, require_text
from pagedcore_adapters._langchain_tools import (
    Schema,
    StructuredMethod,
    ToolLike,
    check_method,
    form_options,
    parsed,
    parser_of,
    tool_name,
    tool_options,
)
from pagedcore_adapters.langchain_llm import PagedCoreLLM

__all__ = ["ChatPagedCore", "PagedCoreLLM"]


class ChatPagedCore(PagedCoreModel, BaseChatModel):
    """Chat over a pagedcore engine: native sync and async, streaming, tools, structured output, `batch` in one engine batch.

    `ChatPagedCore()` alone runs the embedded model on an engine that every model object of the same configuration shares.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    is_chat: ClassVar[bool] = True

    streaming: bool = False
    """True makes invoke stream inside, so that token callbacks fire."""
    tool_parser: FormName = "auto"
    """How the model writes calls; "auto" reads it off its chat template."""

    @property
    def _llm_type(self) -> str:
        return "pagedcore-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._named(super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As every Runnable's, but all inputs are in the engine at once unless the config sets max_concurrency.

        The first failure, and Ctrl-C, ends the other requests.
        """
        return batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """As every Runnable's, with the same differences as `batch`; leaving it early ends what still runs."""
        return batch_as_completed(self, inputs, config, return_exceptions=return_exceptions, **kwargs)

    def generate(self, messages: list[list[BaseMessage]], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """As BaseChatModel's, but all conversations are in the engine at once."""
        if len(messages) < 2 or kwargs.get("run_id") is not None:
            return super().generate(messages, stop, *args, **kwargs)
        inner = super().generate
        results = run_at_once(lambda conversation: inner([conversation], stop, *args, **kwargs), messages)
        run = [info for result in results for info in result.run or []]
        return LLMResult(generations=[result.generations[0] for result in results], llm_output=results[0].llm_output, run=run or None)

    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools to call, and with any other options of its calls.

        `tool_choice` is "auto" (the default: text or calls), "none", "required", "any" or True (at least one call) or a tool's
        name. A required call always follows the tool's schema; with `strict` so does a call that the model chooses to make.
        `parallel_tool_calls=False` takes one call only. A call that max_tokens cut off is in `invalid_tool_calls`; in a stream,
        where LangChain completes what came of its arguments, only the finish_reason "length" tells. Tools that cannot be used are an
        `InvalidRequestError` of the call.
        """
        return self.bind(**tool_options(tools, tool_choice, parallel_tool_calls, strict), **kwargs)

    def with_structured_output(
        self,
        schema: Schema,
        *,
        include_raw: bool = False,
        method: StructuredMethod = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as objects of a pydantic class, or as dictionaries for a TypedDict or a JSON schema.

        The model cannot leave the schema: as text by "json_schema", which any model can do and which does not show the schema to
        it, or as the arguments of a call by "function_calling", which does, and needs a model that is taught tools. "json_mode"
        is any JSON object, of a form that the prompt asks for. `strict` makes every field required. `include_raw` gives
        {"raw": message, "parsed": object, "parsing_error": error}. Raises `InvalidRequestError` for another method.
        """
        check_method(method)
        traced = {"ls_structured_output_format": {"kwargs": {"method": method, "strict": strict}, "schema": schema}}
        if method == "function_calling":
            name = tool_name(schema)
            model = self.bind_tools([schema], tool_choice=name, parallel_tool_calls=False, strict=strict, **traced, **kwargs)
        else:
            model = self.bind(**form_options(schema, method, strict), **traced, **kwargs)
        return parsed(model, parser_of(schema, method), include_raw=include_raw)

    def _chat(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Chat:
        asked = self._asked(stop, options)
        engine = self._engine(asked.model)
        text = require_text(engine)
        answer = plan_answer(asked.tools, asked.structured, text, self.tool_parser)
        prompt = make_prompt(messages, text, answer, asked.chat_template_kwargs)
        answer = answer.continuing(prompt)
        return Chat(call=self._call(engine, asked, answer.structured), prompt=prompt, answer=answer)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._chat(messages, stop, kwargs).invoke()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await self._chat(messages, stop, kwargs).ainvoke()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._chat(messages, stop, kwargs).stream()) as chunks:
            for chunk in chunks:
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
        async with aclosing(self._chat(messages, stop, kwargs).astream()) as chunks:
            async for chunk in chunks:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
