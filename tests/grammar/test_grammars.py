"""What each form lets through, what is refused and why, and what is kept."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from pagedcore.errors import InvalidRequestError, MissingExtraError, UnsupportedFeatureError
from pagedcore.grammar import grammars as grammars_module
from pagedcore.grammar import trial as trial_module
from pagedcore.grammar.grammars import Grammars
from pagedcore.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from support.grammars import BACKEND, EOS, VOCAB_SIZE, accepts, allowed, form, ids_of, make_grammars, texts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


@pytest.mark.parametrize(
    ("params", "right", "wrong"),
    [
        (
            form(json=PERSON),
            ['{"name": "Bo", "age": 3}', '{\n "name":"", "age":-1}'],
            ["{}", '{"age": 3, "name": "Bo"}', "[]", '{"name": "Bo"}'],
        ),
        (form(json='{"type": "boolean"}'), ["true", "false"], ["null", "True"]),
        (form(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", "{'a': 1}"]),
        (form(regex=r"[a-c]{2}\d"), ["ab1"], ["ab", "ad1", "ab12"]),
        (form(regex=r"(a/b)?"), ["a/b", ""], ["a"]),
        (form(choice=["yes", 'no "way"', "ye"]), ["yes", "ye", 'no "way"'], ["y", "yess", "no"]),
        (form(grammar='root ::= "a" b\nb ::= "x" | "y"'), ["ax", "ay"], ["a", "axy"]),
        (form(grammar='start: "a" B*\nB: /[0-9]/'), ["a", "a12"], ["1"]),
        (form(json=PERSON, disable_any_whitespace=True), ['{"name":"a b","age":3}'], ['{"name": "a","age":3}']),
    ],
)
def test_a_form_lets_through_what_it_describes_and_nothing_else(
    grammars: Grammars, params: StructuredOutputsParams, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not accepts(grammars, params, text)] == []
    assert [text for text in wrong if accepts(grammars, params, text)] == []


def test_whitespace_between_parts_of_json_ends(grammars: Grammars) -> None:
    assert accepts(grammars, form(json_object=True), "{" + "\n" * 32 + "}")
    assert not accepts(grammars, form(json_object=True), "{" + "\n" * 33 + "}")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (form(json={"type": "strin"}), "Invalid type: strin"),
        (form(json={"enum": []}), "Unsatisfiable"),
        (form(json={"type": "integer", "minimum": 5, "maximum": 1}), "minimum .5. is greater than maximum"),
        (form(json={"not": {"type": "string"}}), 'Unimplemented keys: \\["not"\\]'),
        (form(json={"$ref": "http://example.org/schema"}), "not present"),
        (form(regex="(a"), "unclosed group"),
        (form(regex="(?=a)b"), "look-around"),
        (form(grammar="start: x y"), "unknown name"),
        (form(grammar='root ::= "a" b'), "Rule 'b' not found"),
        (form(grammar="nonsense"), "GBNF"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(grammars: Grammars, params: StructuredOutputsParams, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        grammars.prepare(params)
    assert caught.value.param == "structured_outputs"
    assert not grammars.is_ready(params)


def bombs() -> dict[str, StructuredOutputsParams]:
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    doubling = {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}, "$ref": "#/$defs/d0"}
    doubling["$defs"]["d25"] = {"type": "string"}  # type: ignore[index]
    many = {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)]}
    chain = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
    rules = "\n".join(f'r{i}: "{i}" r{i + 1}?' for i in range(8000))
    return {
        "chain of references": form(json={"$defs": {**chain, "d3000": {"type": "string"}}, "$ref": "#/$defs/d0"}),
        "chain of rules": form(grammar=f'start: r0\n{rules}\nr8000: "x"'),
        "many optional parts": form(regex="a?" * 50_000),
        "deep": form(json=deep),
        "doubling": form(json=doubling),
        "products": form(json=many),
        "wide": form(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}),
        "long": form(json={"type": "string", "minLength": 10**6}),
        "repeats": form(regex="((a{1,100}){1,100}){1,100}"),
        "backtracking": form(regex="(x+x+)+y"),
        "ambiguous": form(grammar='start: start start | "a" | ""'),
    }


@pytest.mark.parametrize("name", bombs())
def test_a_grammar_made_to_take_long_is_compiled_or_refused_in_bounded_time(
    grammars: Grammars, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "MAX_TRIAL_S", 1.0)
    begun = time.monotonic()
    with suppress(InvalidRequestError):
        grammars.prepare(bombs()[name])
    assert time.monotonic() - begun < 60.0, "seconds, on a busy machine; unbounded work would take minutes"


def test_a_large_grammar_that_is_well_passes_its_trial(grammars: Grammars) -> None:
    choices = [f"choice number {index}" for index in range(3000)]
    assert len(form(choice=choices).text) > trial_module.TRIED_CHARS
    assert accepts(grammars, form(choice=choices), choices[1234])


def test_a_grammar_that_ends_its_trial_is_refused_and_not_compiled_here(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "compile_grammar", None)
    with pytest.raises(InvalidRequestError, match="too deeply nested"):
        grammars.prepare(bombs()["chain of references"])


def test_a_grammar_that_grows_too_large_while_it_runs_ends_its_output(grammars: Grammars) -> None:
    params = form(grammar="start: a a a a a\na: b b b b b\nb: c c c c c\nc: /x{0,1000}y?/")
    grammars.prepare(params)
    matcher = grammars.open(params, [])
    for _ in range(2000):
        if not allowed(matcher):
            break
        grammars.advance([matcher], [ids_of("x")[0]])
    assert matcher.error is None or "too" in matcher.error.lower() or "limit" in matcher.error.lower()


def test_a_text_over_the_limit_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_GRAMMAR_CHARS}"):
        form(regex="a" * (MAX_GRAMMAR_CHARS + 1))


def test_compiled_grammars_are_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    grammars = make_grammars()
    a, b, c = (form(regex=text) for text in "abc")
    for params in (a, b, a, c):
        grammars.prepare(params)
    assert [grammars.is_ready(params) for params in (a, b, c)] == [True, False, True]
    assert grammars.is_ready(StructuredOutputsParams(regex="a", field="guided_regex")), "where it was written is no part of a grammar"


def test_many_threads_may_prepare_and_open_at_once() -> None:
    grammars = make_grammars()
    found: list[bool] = []

    def work(index: int) -> None:
        found.append(accepts(grammars, form(choice=[f"c{index % 3}"]), f"c{index % 3}"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12


def test_the_tokenizer_is_asked_for_once_and_only_when_needed() -> None:
    asked: list[int] = []

    def source() -> str:
        asked.append(1)
        return BACKEND.to_str()

    grammars = Grammars(source, VOCAB_SIZE, {EOS})
    assert asked == []
    grammars.prepare(form(regex="a"))
    grammars.prepare(form(regex="b"))
    assert asked == [1]


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="end-of-sequence"):
        make_grammars(eos_token_ids=()).prepare(form(regex="a"))


def test_a_tokenizer_that_the_library_cannot_read_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="this model's tokenizer"):
        Grammars(lambda: json.dumps({"model": {"type": "Unigramme", "vocab": {"a": 0}}}), 1, {0}).prepare(form(regex="a"))


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[grammar\]"):
        make_grammars().prepare(form(regex="a"))


def test_every_end_of_the_model_may_end_the_output() -> None:
    grammars = make_grammars(eos_token_ids=(EOS, 0))
    grammars.prepare(form(regex="a"))
    assert allowed(grammars.open(form(regex="a"), ids_of("a"))) == {0, EOS}


def test_a_padded_vocabulary_and_added_tokens_have_room_in_the_mask() -> None:
    grammars = make_grammars(vocab_size=VOCAB_SIZE + 100)
    grammars.prepare(form(regex="[^x]*"))
    matcher = grammars.open(form(regex="[^x]*"), [])
    assert len(matcher.mask()) >= (VOCAB_SIZE + 100) / 8
    assert max(allowed(matcher)) < VOCAB_SIZE
    small = make_grammars(vocab_size=10)
    small.prepare(form(regex="a"))
    assert len(small.open(form(regex="a"), []).mask()) >= VOCAB_SIZE / 8


def test_only_tokens_that_can_follow_are_allowed(grammars: Grammars) -> None:
    params = form(choice=["kx", "kq"])
    grammars.prepare(params)
    assert texts(allowed(grammars.open(params, []))) == {"k"}
    assert texts(allowed(grammars.open(params, ids_of("k")))) == {"q", "x"}
