"""LangChain's own unit tests for chat models."""

from __future__ import annotations

from typing import Any

from langchain_tests.unit_tests import ChatModelUnitTests

from pagedcore_adapters.langchain_chat import ChatPagedCore


class TestChatPagedCore(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPagedCore]:
        return ChatPagedCore

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "a-model"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """The suite's, without those of a remote API (api_key, timeout, max_retries), which are refused."""
        return {"temperature": 0, "max_tokens": 100, "stop": []}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False
