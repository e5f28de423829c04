"""Running a call on the engine: one stream of outputs, however many prompts it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from pagedcore.client import EngineClient, RequestContext
from pagedcore.errors import EngineError
from pagedcore.openai.calls import Call
from pagedcore.outputs import RequestOutput

IndexedOutput = tuple[int, RequestOutput]
"""Index of the prompt, and what the engine has for it."""


async def run_call(client: EngineClient, call: Call, request_id: str, context: RequestContext) -> AsyncGenerator[IndexedOutput, None]:
    """Outputs of all prompts as they come. Closing it aborts what still runs.

    Raises the error of the first prompt that the engine refuses or that fails; the others are aborted.
    """
    many = len(call.prompts) > 1
    streams = [
        client.generate(prompt.token_ids, call.params, f"{request_id}-{index}" if many else request_id, context=context)
        for index, prompt in enumerate(call.prompts)
    ]
    try:
        if many:
            async with aclosing(_interleave(streams)) as outputs:
                async for index, output in outputs:
                    yield index, _checked(output)
        else:  # one layer less for every token
            async for output in streams[0]:
                yield 0, _checked(output)
    finally:
        for stream in streams:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise output.error
    if output.status in ("rejected", "error"):
        raise EngineError(f"The engine ended the request with status {output.status!r} and gave no reason.")
    return output


async def _interleave(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncGenerator[IndexedOutput, None]:
    waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                output = task.result()
                if output is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
