"""ChatPagedCore as the model of a LangGraph agent; runs where langgraph is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool

from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.scripted_loop import scripted_engine

graphs = pytest.importorskip("langgraph.graph")
prebuilt = pytest.importorskip("langgraph.prebuilt")

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"{city}: sunny"


def say(prompt: str) -> str:
    return "It is sunny." if "tool: Paris: sunny" in prompt else PARIS


def make_agent(chat: ChatPagedCore) -> Any:
    model = chat.bind_tools([get_weather])

    def call_model(state: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", prebuilt.ToolNode([get_weather]))
    graph.add_edge(graphs.START, "model")
    graph.add_conditional_edges("model", prebuilt.tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def test_an_agent_calls_its_tool_and_answers(tmp_path: Path) -> None:
    with scripted_engine(tmp_path, say) as (engine, _):
        messages = make_agent(ChatPagedCore(engine=engine)).invoke({"messages": [HumanMessage("weather?")]})["messages"]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert (messages[2].content, messages[3].content) == ("Paris: sunny", "It is sunny.")


def test_an_agent_that_streams_messages_gives_the_models_pieces(tmp_path: Path) -> None:
    with scripted_engine(tmp_path, say) as (engine, _):
        agent = make_agent(ChatPagedCore(engine=engine))
        streamed = [message for message, _ in agent.stream({"messages": [HumanMessage("weather?")]}, stream_mode="messages")]
    pieces = [message for message in streamed if isinstance(message, AIMessageChunk)]
    assert len(pieces) > 1
    assert "".join(str(piece.content) for piece in pieces) == "It is sunny."
    assert "".join(chunk["args"] or "" for piece in pieces for chunk in piece.tool_call_chunks) == '{"city": "Paris"}'
