"""Running a call on the engine: what is closed, when, and in which order outputs come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagedcore.client import RequestContext
from pagedcore.errors import EngineError, StepFailedError
from pagedcore.openai import ServerSettings
from pagedcore.openai.calls import Call, read_completion
from pagedcore.openai.streams import run_call
from pagedcore.outputs import RequestOutput
from support.fake_client import FakeClient, Script


class KeepingClient(FakeClient):
    """Holds on to its generators, so that none is closed by the garbage collector."""

    def __init__(self, *scripts: Script) -> None:
        super().__init__(*scripts)
        self.kept: list[Any] = []

    def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[RequestOutput]:  # type: ignore[override]
        self.kept.append(super().generate(*args, **kwargs))
        return self.kept[-1]  # type: ignore[no-any-return]


def make_call(client: FakeClient, prompt: Any) -> Call:
    return read_completion(json.dumps({"prompt": prompt}).encode(), client, ServerSettings())


@pytest.mark.asyncio
@pytest.mark.parametrize("prompts", [["a"], ["a", "b", "c"]])
async def test_closing_a_call_between_two_outputs_aborts_all_of_its_requests(prompts: list[str]) -> None:
    client = KeepingClient(Script(pieces=("1", "2", "3")))
    outputs = run_call(client, make_call(client, prompts), "id", RequestContext())
    await anext(outputs)
    await outputs.aclose()
    assert client.num_open == 0
    assert len(client.aborted) == len(prompts)


@pytest.mark.asyncio
async def test_an_error_of_one_prompt_is_raised_after_the_others_were_aborted() -> None:
    client = KeepingClient(Script(pieces=("1", "2")), Script(error=StepFailedError("The step failed.")))
    with pytest.raises(StepFailedError):
        async for _ in run_call(client, make_call(client, ["a", "b"]), "id", RequestContext()):
            pass
    assert client.num_open == 0
    assert "id-0" in client.aborted


@pytest.mark.asyncio
async def test_outputs_of_several_prompts_come_interleaved_under_their_index() -> None:
    client = FakeClient(Script(pieces=("1", "2")), Script(pieces=("x", "y", "z")))
    call = make_call(client, ["a", "b"])
    seen = [(index, output.text) async for index, output in run_call(client, call, "id", RequestContext())]
    assert seen == [(0, "1"), (1, "x"), (0, "2"), (1, "y"), (1, "z")]


@pytest.mark.asyncio
@pytest.mark.parametrize("status", ["rejected", "error"])
async def test_a_failed_output_without_its_error_is_still_an_error(status: Any) -> None:
    class Silent(FakeClient):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                output.status = status
                yield output

    client = Silent()
    with pytest.raises(EngineError, match=status):
        await anext(run_call(client, make_call(client, "a"), "id", RequestContext()))
