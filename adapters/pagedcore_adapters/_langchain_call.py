"""One LangChain call on its way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from pagedcore import AsyncEngine, RequestOutput, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import UnsupportedFeatureError
from pagedcore_adapters._langchain_batch import current_batch, new_request_id, run_at_once

PROVIDER = "pagedcore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The settings of one call, ready for the engine; runs any number of prompts."""

    engine: AsyncEngine
    params: SamplingParams
    context: RequestContext
    is_chat: bool
    """The prompt is templated text: its special tokens are in it already."""
    model_name: str

    def run(self, prompt: str) -> Iterator[RequestOutput]:
        """Outputs of one request; closing the iterator aborts it, and so does leaving the batch that it is of.

        Raises the error of a refused or failed request.
        """
        batch, request_id = current_batch(), new_request_id()
        outputs = self.engine.generate_sync(prompt, self.params, request_id, context=self.context, add_special_tokens=not self.is_chat)
        with nullcontext() if batch is None else batch.running(request_id, self.engine), closing(cast("Generator[RequestOutput]", outputs)):
            for output in outputs:
                if batch is not None:
                    batch.check()
                yield _checked(output)

    async def arun(self, prompt: str) -> AsyncIterator[RequestOutput]:
        """The same on the running event loop; cancelling its task aborts too."""
        outputs = self.engine.generate(prompt, self.params, context=self.context, add_special_tokens=not self.is_chat)
        async with aclosing(cast("AsyncGenerator[RequestOutput]", outputs)):
            async for output in outputs:
                yield _checked(output)

    def stream(self, prompt: str) -> Generator[RequestOutput]:
        """`run`, but only outputs that add text, and the last one. Raises `UnsupportedFeatureError` for n > 1."""
        self._require_single_choice()
        with closing(cast("Generator[RequestOutput]", self.run(prompt))) as outputs:
            yield from filter(_is_visible, outputs)

    async def astream(self, prompt: str) -> AsyncGenerator[RequestOutput]:
        """The same on the running event loop."""
        self._require_single_choice()
        async with aclosing(cast("AsyncGenerator[RequestOutput]", self.arun(prompt))) as outputs:
            async for output in outputs:
                if _is_visible(output):
                    yield output

    def collect(self, prompt: str) -> RequestOutput:
        """The finished output of one request."""
        for output in self.run(prompt):
            last = output
        return last

    def collect_all(self, prompts: Sequence[str]) -> list[RequestOutput]:
        """The finished outputs of all prompts, which are in the engine at once; the first failure ends the other requests."""
        return run_at_once(self.collect, prompts)

    async def acollect(self, prompt: str) -> RequestOutput:
        """`collect` on the running event loop."""
        async with aclosing(cast("AsyncGenerator[RequestOutput]", self.arun(prompt))) as outputs:
            async for output in outputs:
                last = output
        return last

    async def acollect_all(self, prompts: Sequence[str]) -> list[RequestOutput]:
        """`collect_all` on the running event loop; the first failure ends the other requests."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.acollect(prompt)) for prompt in prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    def metadata(self, output: RequestOutput, index: int = 0) -> dict[str, Any]:
        """What LangChain calls response metadata, of one finished choice."""
        choice = output.outputs[index]
        return {
            "model_name": self.model_name,
            "model_provider": PROVIDER,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "request_id": output.request_id,
        }

    def _require_single_choice(self) -> None:
        if self.params.n > 1:
            raise UnsupportedFeatureError(f"n is {self.params.n} and a LangChain stream has one choice; use invoke or generate.", param="n")


def usage(output: RequestOutput) -> UsageMetadata:
    """Token counts of a finished request; `cache_read` are prompt tokens that the prefix cache served."""
    num_prompt, num_output = len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)
    return UsageMetadata(
        input_tokens=num_prompt,
        output_tokens=num_output,
        total_tokens=num_prompt + num_output,
        input_token_details=InputTokenDetails(cache_read=output.num_cached_tokens),
    )


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise output.error
    return output


def _is_visible(output: RequestOutput) -> bool:
    return output.finished or output.text != ""
