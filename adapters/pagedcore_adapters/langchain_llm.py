"""`PagedCoreLLM`: the engine as a LangChain text completion model, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from typing import Any, ClassVar

from pagedcore_adapters._extras import missing_extra

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
except ImportError as error:
    raise missing_extra("langchain_core", "langchain", error) from error
from langchain_core.language_models import BaseLLM, LangSmithParams, LanguageModelInput
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from pagedcore import RequestOutput
from pagedcore_adapters._langchain_batch import batch, batch_as_completed
from pagedcore_adapters._langchain_call import Call, usage
from pagedcore_adapters._langchain_model import PagedCoreModel

DEFAULT_MAX_TOKENS = 256
"""A completion model need not ever stop by itself."""


class PagedCoreLLM(PagedCoreModel, BaseLLM):
    """Text completion over a pagedcore engine: prompts are taken as they are, without a chat template.

    All prompts of a `batch` or `generate` are in the engine at once.
    """

    model_config = ConfigDict(populate_by_name=True, extra="forbid", arbitrary_types_allowed=True)

    is_chat: ClassVar[bool] = False

    max_tokens: int | None = DEFAULT_MAX_TOKENS

    @property
    def _llm_type(self) -> str:
        return "pagedcore"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._named(super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """As BaseLLM's, but max_concurrency refills as requests end, and an exception is that of its own input only."""
        if return_exceptions or _limits_concurrency(config, len(inputs)):
            return batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)
        return super().batch(inputs, config, **kwargs)

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

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The same on the running event loop."""
        if return_exceptions or _limits_concurrency(config, len(inputs)):
            return await Runnable.abatch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)
        return await super().abatch(inputs, config, **kwargs)

    def _request(self, stop: list[str] | None, options: dict[str, Any]) -> Call:
        asked = self._asked(stop, options)
        return self._call(self._engine(asked.model), asked, asked.structured)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._request(stop, kwargs)
        return _result(call, call.collect_all(prompts))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self._request(stop, kwargs)
        return _result(call, await call.acollect_all(prompts))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self._request(stop, kwargs)
        with closing(call.stream(prompt)) as outputs:
            for output in outputs:
                chunk = _chunk(call, output)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = self._request(stop, kwargs)
        async with aclosing(call.astream(prompt)) as outputs:
            async for output in outputs:
                chunk = _chunk(call, output)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


def _limits_concurrency(config: RunnableConfig | list[RunnableConfig] | None, num_inputs: int) -> bool:
    configs = get_config_list(config, num_inputs) if num_inputs else []
    return any(one.get("max_concurrency") is not None for one in configs)


def _info(call: Call, output: RequestOutput, index: int) -> dict[str, Any]:
    return {**call.metadata(output, index), "usage_metadata": usage(output)}


def _chunk(call: Call, output: RequestOutput) -> GenerationChunk:
    return GenerationChunk(text=output.text, generation_info=_info(call, output, 0) if output.finished else None)


def _result(call: Call, outputs: list[RequestOutput]) -> LLMResult:
    generations = [
        [Generation(text=choice.text, generation_info=_info(call, output, choice.index)) for choice in output.outputs] for output in outputs
    ]
    return LLMResult(generations=generations, llm_output={"model_name": call.model_name})
