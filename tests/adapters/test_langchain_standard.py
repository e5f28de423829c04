"""LangChain's own tests for chat models, over a scripted engine whose answers the real grammars check."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests

from pagedcore import AsyncEngine
from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.scripted_loop import scripted_engine

JOKE = json.dumps({"setup": "Why do cats sit on keyboards?", "punchline": "They like the tab key."})
for _name, _test in inspect.getmembers(ChatModelIntegrationTests, inspect.iscoroutinefunction):
    pytest.mark.asyncio(_test)  # the suite leaves it to asyncio_mode="auto"

CALLS = {
    "magic_function(3)": ("magic_function", {"input": 3}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "Pirate": ("greeting_generator", {"answer_style": "Pirate"}),
    "San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "Hello!": ("magic_function", {"input": 1}),
    "joke": ("Joke", json.loads(JOKE)),
    "3 + 4": ("my_adder_tool", {"a": 3, "b": 4}),
    "你好": ("unicode_customer", {"customer_name": "你好啊集团", "description": "科技公司"}),
    "こんにちは": ("unicode_customer", {"customer_name": "こんにちは株式会社", "description": "会社"}),
}
"""Words of a question -> the call that the suite expects as its answer."""


def say(prompt: str) -> str:
    """What a good model says: a call where there are tools and no result yet, JSON where JSON is asked for, otherwise words."""
    *_, question = prompt.split("user: ")
    if "tools: " in prompt and "tool: " not in question:
        for words, (name, arguments) in CALLS.items():
            name = "JokeDict" if name == "Joke" and '"name": "JokeDict"' in prompt else name
            if words.lower() in question.lower() and f'"name": "{name}"' in prompt:
                call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
                return f"<tool_call>\n{call}\n</tool_call>"
    return JOKE if "joke" in question else "Hello from a scripted model."


class Suite:
    """What both suites are told of the model."""

    @property
    def chat_model_class(self) -> type[ChatPagedCore]:
        return ChatPagedCore

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """The suite's, without those of a remote API (api_key, timeout, max_retries), which are refused."""
        return {"temperature": 0, "max_tokens": 200, "stop": []}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnits(Suite, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "a-model"}


class Scripted(Suite):
    """A model over an engine that says what `say` says."""

    engine: AsyncEngine

    @pytest.fixture(autouse=True)
    def scripted(self, tmp_path: Any) -> Iterator[None]:
        with scripted_engine(tmp_path, say) as (engine, _):
            type(self).engine = engine
            yield

    @pytest.fixture
    def model(self, request: Any, scripted: None) -> ChatPagedCore:
        """The suite's own, but made after the engine."""
        extra = getattr(request, "param", None) or {}
        return ChatPagedCore(**{**self.standard_chat_model_params, **self.chat_model_params, **extra})

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}


class TestIntegration(Scripted, ChatModelIntegrationTests):
    @property
    def model_override_value(self) -> str:
        return "also-fake"

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:  # type: ignore[override]
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPagedCore(engine=self.engine)
        if not stream:
            return model.invoke("Hello")
        first, *rest = model.stream("Hello")
        for chunk in rest:
            first = first + chunk  # type: ignore[assignment]
        return first


class TestFunctionCalling(Scripted, ChatModelTests):
    """The structured outputs again, by the other method."""

    test_structured_output = ChatModelIntegrationTests.test_structured_output
    test_structured_output_async = ChatModelIntegrationTests.test_structured_output_async
    test_structured_output_pydantic_2_v1 = ChatModelIntegrationTests.test_structured_output_pydantic_2_v1
    test_structured_output_optional_param = ChatModelIntegrationTests.test_structured_output_optional_param

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
