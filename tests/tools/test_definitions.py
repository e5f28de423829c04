"""Tools of a request are checked field by field; errors name the field."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.tools.definitions import MAX_TOOLS, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA, **function}}


@pytest.mark.parametrize(("choice", "expected"), [(None, "auto"), ("auto", "auto"), ("required", "required")])
def test_a_choice_says_whether_a_call_must_come(choice: Any, expected: str) -> None:
    tools = read_tools([tool("f"), tool("g", strict=True)], choice, None)
    assert tools is not None
    assert (tools.choice, tools.names, tools.are_parallel) == (expected, {"f", "g"}, True)
    assert [one.is_strict for one in tools.tools] == [False, True]


def test_a_named_tool_is_the_only_one_and_is_called_once_while_the_template_shows_all() -> None:
    tools = read_tools([tool("f"), tool("g")], {"type": "function", "function": {"name": "g"}}, True)
    assert tools is not None
    assert (tools.choice, tools.names, tools.are_parallel) == ("named", {"g"}, False)
    assert [entry["function"]["name"] for entry in tools.shown] == ["f", "g"]


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), ([], "none"), ([tool()], "none")])
def test_without_tools_or_with_choice_none_nothing_can_be_called(tools: Any, choice: Any) -> None:
    assert read_tools(tools, choice, None) is None


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_may_have_no_arguments(parameters: Any) -> None:
    tools = read_tools([tool(parameters=parameters)], None, None)
    assert tools is not None
    assert tools.tools[0].parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        ([], "required", "tool_choice", "needs tools"),
        ("f", None, "tools", "a list of tools"),
        ([tool(f"f{index}") for index in range(MAX_TOOLS + 1)], None, "tools", f"at most {MAX_TOOLS}"),
        (["f"], None, "tools[0]", "must be"),
        ([tool(), {"type": "function"}], None, "tools[1].function", "an object with a name"),
        ([tool(), tool()], None, "tools[1].function.name", "'f' twice"),
        ([tool("a b")], None, "tools[0].function.name", "letters, digits"),
        ([tool("x" * 65)], None, "tools[0].function.name", "1 to 64"),
        ([tool(name=7)], None, "tools[0].function.name", "is 7"),
        ([tool(parameters=[])], None, "tools[0].function.parameters", "JSON schema"),
        ([tool(parameters={"type": "array"})], None, "tools[0].function.parameters", '"type": "object"'),
        ([tool(description=3)], None, "tools[0].function.description", "a string"),
        ([tool(strict="yes")], None, "tools[0].function.strict", "true or false"),
        ([tool(params={})], None, "tools[0].function.params", "did you mean 'parameters'"),
        ([{**tool(), "id": "1"}], None, "tools[0].id", "not a field"),
        ([tool()], "any", "tool_choice", '"required"'),
        ([tool()], {"type": "function"}, "tool_choice", "must be"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice", "none of tools: f"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, choice: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools, choice, None)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_tools_that_are_no_functions_are_not_offered() -> None:
    with pytest.raises(UnsupportedFeatureError, match="functions only") as caught:
        read_tools([{"type": "custom", "custom": {"name": "f"}}], None, None)
    assert caught.value.param == "tools[0].type"
