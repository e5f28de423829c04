"""The small embedded model as an agent and as a source of objects: it writes valid calls and JSON, because it has to."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from pydantic import BaseModel, Field

from pagedcore_adapters.langchain_chat import ChatPagedCore
from pagedcore_adapters.shared_engine import close_shared_engines
from support.repository import ROOT

pytestmark = [pytest.mark.model, pytest.mark.slow]

CONFIG: dict[str, Any] = {
    "num_kv_blocks": 256,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "dtype": "float32",
    "metrics_instance": "langchain-agent",
}


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=8)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("langchain_agent", ROOT / "examples" / "langchain_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the tools' types are looked up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chat(example: ModuleType) -> Iterator[ChatPagedCore]:
    yield ChatPagedCore(engine_config={**CONFIG, "chat_template": example.TEMPLATE}, temperature=0, max_tokens=60)
    close_shared_engines()


def test_the_example_calls_both_tools_and_ends_with_an_answer(example: ModuleType, chat: ChatPagedCore) -> None:
    messages = example.run(chat, "I fly to Paris tomorrow. Look up the weather and pack what I need.")
    _question, first, weather, second, packed, _request, last = messages
    assert [call["name"] for message in (first, second) for call in message.tool_calls] == ["get_weather", "pack"]
    assert isinstance(weather, ToolMessage)
    assert weather.content in {"rain", "sun", "clouds"}
    assert packed.content.startswith("Packed: ")
    assert isinstance(last, AIMessage)
    assert (last.tool_calls, last.text != "") == ([], True)
    assert second.usage_metadata["input_token_details"]["cache_read"] >= 64, "the tools and the question were there before"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_objects_come_out_valid_whole_streamed_and_in_a_batch(chat: ChatPagedCore, method: Any) -> None:
    model = chat.with_structured_output(Pet, method=method)
    whole = model.invoke("Describe your pet.")
    assert isinstance(whole, Pet)
    assert list(model.stream("Describe your pet."))[-1] == whole
    assert all(isinstance(pet, Pet) for pet in model.batch([f"Describe pet {n}." for n in range(2)]))


def test_json_mode_is_an_object(chat: ChatPagedCore) -> None:
    schema = {"title": "Any", "description": "Any object.", "type": "object"}
    asked = chat.with_structured_output(schema, method="json_mode", include_raw=True, max_tokens=80)
    assert asked.invoke("A JSON object with the name of a pet.")["raw"].text.lstrip().startswith("{")


@pytest.mark.asyncio
async def test_a_stream_of_a_call_names_it_once_and_ends_in_valid_arguments(chat: ChatPagedCore, example: ModuleType) -> None:
    model = chat.bind_tools([example.get_weather], tool_choice="any", parallel_tool_calls=False)
    chunks = [chunk async for chunk in model.astream("Weather in Cairo?")]
    whole: Any = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert [piece["name"] for chunk in chunks for piece in chunk.tool_call_chunks if piece["name"]] == ["get_weather"]
    assert set(whole.tool_calls[0]["args"]) == {"city"}
    assert whole.response_metadata["finish_reason"] == "tool_calls"
