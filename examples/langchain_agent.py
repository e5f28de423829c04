"""A LangChain agent with two tools on an engine in this process: the model calls, the program runs the tools, the model answers.

The embedded model is small and was taught no tools: a chat template shows it some, and `tool_choice` makes it call. The engine's
grammar lets it write nothing but a valid call.
"""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import BaseTool, tool

from pagedcore_adapters.langchain_chat import ChatPagedCore

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call a function by writing <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Functions:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@tool
def get_weather(city: Literal["Berlin", "Cairo", "Paris"]) -> str:
    """The weather in a city."""
    return {"Berlin": "rain", "Cairo": "sun", "Paris": "clouds"}[city]


@tool
def pack(item: Literal["an umbrella", "sunglasses"]) -> str:
    """Put something into the suitcase."""
    return f"Packed: {item}"


TOOLS: dict[str, BaseTool] = {one.name: one for one in (get_weather, pack)}
STEPS = ("get_weather", "pack")
"""What the model must do, one step a turn, before it answers."""


def run(chat: ChatPagedCore, question: str) -> list[BaseMessage]:
    """The conversation from the question to the answer."""
    messages: list[BaseMessage] = [HumanMessage(question)]
    for step in STEPS:
        reply = chat.bind_tools(list(TOOLS.values()), tool_choice=step).invoke(messages)
        messages.append(reply)
        messages += [TOOLS[call["name"]].invoke(call) for call in reply.tool_calls]
    messages.append(HumanMessage("Tell me in one sentence how the weather is and what you packed."))
    return [*messages, chat.invoke(messages)]


def main() -> None:
    chat = ChatPagedCore(engine_config={"chat_template": TEMPLATE}, temperature=0, max_tokens=60)
    for message in run(chat, "I fly to Paris tomorrow. Look up the weather and pack what I need."):
        message.pretty_print()
    print(f"prompt tokens from the cache: {chat.stats().hit_rate('prefix'):.0%}")


if __name__ == "__main__":
    main()
