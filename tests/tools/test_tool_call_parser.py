"""Calls are read out of a model's text, whatever its form and however it is cut; what is no call stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.tools.forms import FORMS, HERMES, LLAMA3, MISTRAL, ToolForm
from pagedcore.tools.objects import delta_of, message_of
from pagedcore.tools.parser import ToolCallParser
from pagedcore.tools.parts import CallPart, Part, TextPart

NAMES = frozenset({"f", "get_weather"})
Read = list[tuple[str, ...]]


def read(form: ToolForm, pieces: Iterable[str], *, max_calls: int | None = None) -> Read:
    """("text", ...) and ("call", name, arguments) in their order, joined. Checks the order of each call's parts."""
    parser = ToolCallParser(form, NAMES, max_calls=max_calls)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    found: Read = []
    for part in parts:
        if isinstance(part, TextPart):
            assert part.text, "an empty part says nothing"
            joined = found.pop()[1] if found and found[-1][0] == "text" else ""
            found.append(("text", joined + part.text))
        elif part.name is not None:
            assert (part.arguments, bool(part.call_id)) == ("", True)
            assert part.index == sum(kind == "call" for kind, *_ in found)
            found.append(("call", part.name, ""))
        else:
            kind, name, arguments = found.pop()
            assert (kind, part.call_id) == ("call", None)
            assert part.arguments, "an empty part says nothing"
            found.append((kind, name, arguments + part.arguments))
    assert parser.has_calls == any(kind == "call" for kind, *_ in found)
    return found


CASES: list[tuple[ToolForm, str, Read]] = [
    (HERMES, "no call at all", [("text", "no call at all")]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("call", "f", '{"a": 1}')]),
    (HERMES, 'One moment.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', [("text", "One moment."), ("call", "f", "{}")]),
    (
        HERMES,
        (
            '<tool_call>{"name": "f", "arguments": {"a": "}\\"</tool_call>"}}</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "get_weather"}</tool_call>'
        ),
        [("call", "f", '{"a": "}\\"</tool_call>"}'), ("call", "get_weather", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("call", "f", "{}")]),
    (HERMES, '<tool_call>{"name": "f"}', [("call", "f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, 2', [("call", "f", '{"a": [1, 2')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> done. ', [("call", "f", "{}"), ("text", "done. ")]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>', [("text", '<tool_call>{"name": "g", "arguments": {}}</tool_call>')]),
    (HERMES, "<tool_call>f(1)</tool_call>", [("text", "<tool_call>f(1)</tool_call>")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', [("text", '<tool_call>{"name": "f", "arguments": [1]}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no"}', [("text", '<tool_call>{"name": "f", "arguments": "no"}')]),
    (HERMES, '<tool_call>{"x": 1, "name": "f"}', [("text", '<tool_call>{"x": 1, "name": "f"}')]),
    (HERMES, '<tool_call>{"name": "f", "name": "f"}', [("text", '<tool_call>{"name": "f", "name": "f"}')]),
    (HERMES, '<tool_call>{"name": "f", "na', [("text", '<tool_call>{"name": "f", "na')]),
    (HERMES, "a <tool_ca", [("text", "a <tool_ca")]),
    (HERMES, '<tool_call>{<tool_call>{"name": "f"}</tool_call>', [("text", "<tool_call>{"), ("call", "f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": x}}', [("call", "f", '{"a": '), ("text", "x}}")]),
    (LLAMA3, ' {"name": "f", "parameters": {"a": 1.5}}', [("call", "f", '{"a": 1.5}')]),
    (LLAMA3, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', [("call", "f", "{}"), ("call", "f", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', [("call", "f", "{}")]),
    (LLAMA3, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("call", "f", "{}")]),
    (LLAMA3, "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
    (LLAMA3, '{"name": "Bob", "age": 4}', [("text", '{"name": "Bob", "age": 4}')]),
    (LLAMA3, '{"name": "f"', [("text", '{"name": "f"')]),
    (LLAMA3, 'Here: {"name": "f", "parameters": {}}', [("text", 'Here: {"name": "f", "parameters": {}}')]),
    (LLAMA3, "\n", [("text", "\n")]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}, "id": "123456789"}]',
        [("call", "f", '{"a": 1}'), ("call", "get_weather", "{}")],
    ),
    (MISTRAL, 'Sure[TOOL_CALLS][{"name":"f","arguments":{}}]', [("text", "Sure"), ("call", "f", "{}")]),
    (MISTRAL, "[TOOL_CALLS] f{}", [("text", "[TOOL_CALLS] f{}")]),
    (MISTRAL, "[TOOL_CALLS]  ", [("text", "[TOOL_CALLS]  ")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_text_are_told_apart(form: ToolForm, text: str, expected: Read) -> None:
    assert read(form, [text]) == expected


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_a_text_that_comes_character_by_character_reads_the_same(form: ToolForm, text: str, expected: Read) -> None:
    assert read(form, text) == expected


PIECES = st.sampled_from(
    [
        *(mark for form in FORMS.values() for mark in (form.opening, form.closing, form.separator, form.list_opening) if mark),
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "get_weather", "parameters": {"b": ["x", {"c": null}]}}',
        '{"arguments": {}, "name": "f"}',
        '{"name": "f"}',
        '{"name": "other", "arguments": {}}',
        '{"name": "f", "arguments": {"a": ',
        "<tool_", "[TOOL", "{", "}", " ", "\n", "text", '"',
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(FORMS.values())), st.lists(PIECES, max_size=8), st.data())
def test_the_parts_do_not_depend_on_where_the_text_is_cut(form: ToolForm, pieces: list[str], data: Any) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    max_calls = data.draw(st.sampled_from([None, 1]))
    assert read(form, parts, max_calls=max_calls) == read(form, [text], max_calls=max_calls) == read(form, text, max_calls=max_calls)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(FORMS.values())), st.lists(PIECES, max_size=8))
def test_nothing_that_a_model_says_is_lost_but_marks_and_whitespace_around_calls(form: ToolForm, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = read(form, [text])
    if all(kind == "text" for kind, *_ in found):
        assert "".join(part[1] for part in found) == text
    bare = re.sub(r"\s", "", text)
    position = 0
    for kind, *rest in found:
        shown = re.sub(r"\s", "", rest[-1] if kind == "text" or rest[-1] != "{}" else "")
        position = bare.find(shown, position)
        assert position >= 0, f"{shown!r} is not in the text, or comes before what precedes it"
        position += len(shown)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_part_of_a_marker_is_shown_before_it_is_known_to_be_none(form: ToolForm) -> None:
    parser = ToolCallParser(form, NAMES)
    for char in "Well, " + form.opening:
        for part in parser.push(char):
            assert isinstance(part, TextPart)
            assert not set(part.text) & set("<[|_>")
    call = json.dumps({"name": "f", form.arguments_key: {"a": 1}})
    parts = [part for char in form.list_opening + call for part in parser.push(char)]
    assert all(isinstance(part, CallPart) for part in parts)


def test_arguments_stream_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    begun = parser.push('{"city": ')
    assert [(type(part), getattr(part, "name", None), part.arguments) for part in begun if isinstance(part, CallPart)] == [
        (CallPart, "f", ""),
        (CallPart, None, '{"city": '),
    ]
    assert parser.push('"Par') == [CallPart(0, arguments='"Par')]
    assert parser.push('is"}}</tool_') == [CallPart(0, arguments='is"}')]
    assert parser.push("call>") == parser.finish() == []


def test_a_json_answer_is_not_held_back_where_a_call_needs_no_marker() -> None:
    assert ToolCallParser(LLAMA3, NAMES).push('{"answer": ') == [TextPart('{"answer'), TextPart('":')]


def test_with_parallel_calls_off_a_second_call_is_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(HERMES, [call + call], max_calls=1) == [("call", "f", "{}"), ("text", call)]
    two = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
    assert read(MISTRAL, [two], max_calls=1) == [("call", "f", "{}"), ("text", ', {"name": "f", "arguments": {}}]')]


@pytest.mark.parametrize(("form", "pattern"), [(HERMES, "call_[0-9a-f]{24}"), (LLAMA3, "call_[0-9a-f]{24}"), (MISTRAL, "[0-9a-f]{9}")])
def test_ids_are_what_the_template_of_the_form_takes_back(form: ToolForm, pattern: str) -> None:
    call = '{"name": "f", "arguments": {}}'
    ids = set()
    for _ in range(5):
        parts = ToolCallParser(form, NAMES).push(form.opening + form.list_opening + call)
        ids |= {part.call_id for part in parts if isinstance(part, CallPart) and part.call_id}
    assert len(ids) == 5
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)


def test_a_message_has_null_content_only_beside_calls() -> None:
    call: list[Part] = [CallPart(0, call_id="c", name="f"), CallPart(0, arguments="{"), CallPart(0, arguments="}")]
    tool_calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert message_of(call, "assistant") == {"role": "assistant", "content": None, "refusal": None, "tool_calls": tool_calls}
    assert message_of([TextPart("a"), *call], "assistant")["content"] == "a"
    assert message_of([], "assistant") == {"role": "assistant", "content": "", "refusal": None}
    thought = message_of([TextPart("hm", is_reasoning=True), TextPart("a")], "assistant")
    assert (thought["reasoning_content"], thought["content"]) == ("hm", "a")


def test_a_delta_names_id_and_function_once() -> None:
    assert json.loads(json.dumps(delta_of(CallPart(1, call_id="c", name="f")))) == {
        "tool_calls": [{"index": 1, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
    }
    assert delta_of(CallPart(1, arguments="{}")) == {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}
    assert delta_of(TextPart("a")) == {"content": "a"}
    assert delta_of(TextPart("a", is_reasoning=True)) == {"reasoning_content": "a"}
