"""Messages with calls and their results reach the chat template as it expects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.text.chat_template import ChatTemplate
from pagedcore.tools.messages import render

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% if m.reasoning_content %}?{{ m.reasoning_content }}{% endif %};{% endfor %}"
)


@dataclass
class Options:
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class Text:
    def render_chat(self, messages: Any, **kwargs: Any) -> str:
        return ChatTemplate({"default": TEMPLATE}).render(messages, {}, kwargs)


def rendered(*messages: dict[str, Any], tools: Any = None) -> str:
    return render(Options(), list(messages), Text(), tools)  # type: ignore[arg-type]


def test_a_whole_round_of_calls_is_rendered_with_arguments_as_an_object() -> None:
    assert rendered(
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "call_1"},
        tools=[{"type": "function", "function": {"name": "f"}}],
    ) == "[f]user:weather?;assistant:<call_1 f Paris>?hm;tool:sunny(call_1);"  # fmt: skip


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls", "a list of calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]", "must be"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": None}]}, "messages[0].tool_calls[0].id", "a string"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
            "a string",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "x": 1}]}, "messages[0].tool_calls[0].x", "not a field"),
        ({"role": "tool"}, "messages[0].content", "a string"),
        ({"role": "tool", "content": "a", "tool_call_id": 4}, "messages[0].tool_call_id", "a string"),
        ({"role": "user", "content": "a", "tool_call_id": "c"}, "messages[0].tool_call_id", "not offered"),
        ({"role": "judge", "content": "a"}, "messages[0].role", "system, developer, user, assistant, tool"),
    ],
)
def test_what_is_wrong_is_named(message: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rendered(message)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_calls_that_are_no_functions_are_not_offered() -> None:
    with pytest.raises(UnsupportedFeatureError, match="functions only"):
        rendered({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]})
