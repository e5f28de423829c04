"""Grammars that force calls let through what the parser of the same form reads, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from pagedcore.grammar.grammars import Grammars
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.definitions import Tools, read_tools
from pagedcore.tools.forcing import calls_or_json, forced_grammar, free_text_or_calls
from pagedcore.tools.forms import FORMS, ToolForm
from pagedcore.tools.parser import ToolCallParser
from pagedcore.tools.parts import CallPart
from support.small_tokenizers import make_byte_level

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "p": {"$ref": "#/$defs/P"}},
    "required": ["a"],
    "$defs": {"P": {"type": "object", "properties": {"x": {"type": "string"}}}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "description": "a ::= b", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g-2"}},
]
SINGLE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
}
DOUBLE = {
    "hermes": SINGLE["hermes"] + '\n<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>',
    "llama3": SINGLE["llama3"] + '; {"name": "g-2", "parameters": {}}',
    "mistral": SINGLE["mistral"][:-1] + ', {"name": "g-2", "arguments": {}}]',
}
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")


class Vocabulary:
    """A tokenizer in which the markers are spelled, added tokens or special ones."""

    def __init__(self, markers: str) -> None:
        self.backend: Tokenizer = make_byte_level()
        if markers != "spelled":
            self.backend.add_tokens([AddedToken(text, special=markers == "special", normalized=False) for text in MARKERS])
        self.eos = self.backend.token_to_id("</s>")
        self.grammars = Grammars(self.backend.to_str, self.backend.get_vocab_size(), {self.eos})

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def token_id_of(self, marker: str) -> int | None:
        ids = self.ids(marker)
        return ids[0] if len(ids) == 1 else None

    def accepts(self, params: StructuredOutputsParams, text: str) -> bool:
        self.grammars.prepare(params)
        matcher = self.grammars.open(params, [])
        for token in [*self.ids(text), self.eos]:
            if not matcher.mask()[token // 8] >> (token % 8) & 1:
                return False
            self.grammars.advance([matcher], [token])
        return matcher.error is None


@pytest.fixture(params=["spelled", "added", "special"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


def tools(*, parallel: bool = True) -> Tools:
    read = read_tools(TOOLS, "required", parallel)
    assert read is not None
    return read


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@FORM
def test_a_forced_answer_is_calls_of_known_tools_with_arguments_that_validate(vocabulary: Vocabulary, form: ToolForm) -> None:
    grammar = forced_grammar(form, tools(), vocabulary.token_id_of)
    single, double = SINGLE[form.name], DOUBLE[form.name]
    assert vocabulary.accepts(grammar, single)
    assert vocabulary.accepts(grammar, double)
    assert vocabulary.accepts(grammar, changed(single, '"a": 1', '"a": 1, "p": {"x": "y"}'))
    for old, new in (('"f"', '"h"'), ('"a": 1', '"a": "s"'), ('"a": 1', ""), ('"a": 1', '"a": 1, "b": 2')):
        assert not vocabulary.accepts(grammar, changed(single, old, new)), (old, new)
    assert not vocabulary.accepts(grammar, "")
    assert not vocabulary.accepts(grammar, "text " + single)


@FORM
def test_without_parallel_calls_one_comes(vocabulary: Vocabulary, form: ToolForm) -> None:
    grammar = forced_grammar(form, tools(parallel=False), vocabulary.token_id_of)
    assert vocabulary.accepts(grammar, SINGLE[form.name])
    assert not vocabulary.accepts(grammar, DOUBLE[form.name])


@FORM
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schemas(vocabulary: Vocabulary, form: ToolForm) -> None:
    grammar = free_text_or_calls(form, tools(), vocabulary.token_id_of)
    for text in ("", "hello {world}. <b>", SINGLE[form.name], DOUBLE[form.name]):
        assert vocabulary.accepts(grammar, text), text
    assert not vocabulary.accepts(grammar, changed(SINGLE[form.name], '"a": 1', '"a": "s"'))
    assert not vocabulary.accepts(grammar, changed(SINGLE[form.name], '"f"', '"h"'))
    if not form.may_be_bare:
        assert vocabulary.accepts(grammar, "hello\n" + SINGLE[form.name] + "\nbye")


@FORM
def test_beside_a_json_answer_either_may_come(vocabulary: Vocabulary, form: ToolForm) -> None:
    answer = StructuredOutputsParams(json={"type": "object", "properties": {"z": {"type": "boolean"}}, "required": ["z"]})
    grammar = calls_or_json(form, tools(), answer, vocabulary.token_id_of)
    assert vocabulary.accepts(grammar, '{"z": true}')
    assert vocabulary.accepts(grammar, SINGLE[form.name])
    assert not vocabulary.accepts(grammar, '{"z": 1}')


@FORM
@pytest.mark.parametrize("texts", [SINGLE, DOUBLE])
def test_the_parser_reads_what_the_grammar_forces(form: ToolForm, texts: dict[str, str]) -> None:
    parser = ToolCallParser(form, {"f", "g-2"})
    parts = parser.push(texts[form.name]) + parser.finish()
    assert all(isinstance(part, CallPart) for part in parts)
    names = [part.name for part in parts if isinstance(part, CallPart) and part.name]
    assert names == (["f"] if texts is SINGLE else ["f", "g-2"])
