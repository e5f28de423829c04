"""Grammars that make a model write calls in its own form, with arguments that follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.definitions import Tool, Tools
from pagedcore.tools.forms import ToolForm

TokenIdOf = Callable[[str], int | None]
"""The id of a marker that is one token; None for one that is spelled."""

_LINE_BREAK = r'"\n"'

_SPACES = {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{1,32}"}}


def forced_grammar(form: ToolForm, tools: Tools, token_id_of: TokenIdOf) -> StructuredOutputsParams:
    """The answer is one call or, where they may be parallel, several."""
    return _grammar("start: calls", *_calls(form, tools, token_id_of))


def free_text_or_calls(form: ToolForm, tools: Tools, token_id_of: TokenIdOf) -> StructuredOutputsParams:
    """The answer is text with any calls in it, whose arguments follow their schemas."""
    if form.may_be_bare:
        return _grammar("start: calls | PLAIN", r"PLAIN: /([^{ \t\r\n](.|\n)*)?/", *_calls(form, tools, token_id_of))
    token_id = token_id_of(form.opening)
    before = ["before[lazy]: TEXT " + _text(form.opening)] if token_id is None else [f"before: TEXT <[{token_id}]>"]
    opened = _opened(form, tools, token_id_of)
    return _grammar(
        f"start: (before {opened}){'*' if tools.are_parallel and not form.separator else '?'} TEXT",
        *before,
        r"TEXT: /(.|\n)*/",
        *_each_call(form, tools),
    )


def calls_or_json(form: ToolForm, tools: Tools, answer: StructuredOutputsParams, token_id_of: TokenIdOf) -> StructuredOutputsParams:
    """The answer is calls, or JSON."""
    rules = ["start: calls | answer", f"answer: {_json(json.loads(answer.text))}", *_calls(form, tools, token_id_of)]
    return _grammar(*rules)


def _grammar(*rules: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar="\n".join(rules), field="tools")


def _calls(form: ToolForm, tools: Tools, token_id_of: TokenIdOf) -> list[str]:
    """The rule `calls`, with the markers that begin them, and what it needs."""
    opening = "" if form.may_be_bare else _marker(form.opening, token_id_of)
    opened = f"{opening} {_opened(form, tools, token_id_of)}"
    more = f" ({_LINE_BREAK} {opened})*" if tools.are_parallel and not form.separator else ""
    return [f"calls: {opened}{more}", *_each_call(form, tools)]


def _opened(form: ToolForm, tools: Tools, token_id_of: TokenIdOf) -> str:
    """What follows the opening marker."""
    if not form.separator:
        return f"{_LINE_BREAK} call {_LINE_BREAK} {_marker(form.closing, token_id_of)}"
    more = f" ({_text(form.separator + ' ')} call)*" if tools.are_parallel else ""
    return f"{_literal(form.list_opening)}call{more}{_literal(form.closing)}"


def _each_call(form: ToolForm, tools: Tools) -> list[str]:
    names = [f"call_{index}" for index in range(len(tools.tools))]
    calls = [f"{name}: {_call(form, tool)}" for name, tool in zip(names, tools.tools, strict=True)]
    return [f"call: {' | '.join(names)}", *calls]


def _call(form: ToolForm, tool: Tool) -> str:
    # The bracket stands by itself: a lexer that has begun a longer literal would not go back to the bracket of another object.
    head = f'"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
    return f'"{{" {_text(head)} {_json(_closed(tool.parameters))} "}}"'


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that a schema does not name are not made up."""
    return schema if "additionalProperties" in schema or "patternProperties" in schema else {**schema, "additionalProperties": False}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**_SPACES, **schema}, ensure_ascii=False)}"


def _marker(marker: str, token_id_of: TokenIdOf) -> str:
    token_id = token_id_of(marker)
    return _text(marker) if token_id is None else f"<[{token_id}]>"


def _literal(text: str) -> str:
    return f" {_text(text)} " if text else ""


def _text(text: str) -> str:
    return json.dumps(text)
