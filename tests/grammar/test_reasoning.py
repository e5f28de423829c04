"""Reasoning before a form: free up to its end, whatever tokens the end is made of; the form's from then on, and never before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from pagedcore.grammar.grammars import MAX_KEPT_ENDS, Grammars
from pagedcore.grammar.matcher import Matcher
from pagedcore.structured_outputs import StructuredOutputsParams
from support.grammars import EOS, allowed, form
from support.small_tokenizers import make_byte_level

OPENED = {"reasoning_end": "</think>"}
MAY_OPEN = {"reasoning_end": "</think>", "reasoning_start": "<think>"}
OVERRUNNING, HARMLESS, WHOLE = ">x", ">\n\n", "a</think>{"


def make_backend(*, has_markers: bool) -> Tokenizer:
    """Bytes, and tokens that hold the last of an end with something after it; the markers may be tokens of their own."""
    backend = make_byte_level()
    names = [OVERRUNNING, HARMLESS, WHOLE, *(["<think>", "</think>"] if has_markers else [])]
    backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    return backend


BACKENDS = {True: make_backend(has_markers=True), False: make_backend(has_markers=False)}
GRAMMARS = {key: Grammars(backend.to_str, backend.get_vocab_size(), [EOS]) for key, backend in BACKENDS.items()}


class Writer:
    """One output over one of the vocabularies."""

    def __init__(self, params: StructuredOutputsParams, token_ids: Sequence[int] = (), *, has_markers: bool) -> None:
        self.backend, self.grammars = BACKENDS[has_markers], GRAMMARS[has_markers]
        self.grammars.prepare(params)
        self.matcher: Matcher = self.grammars.open(params, token_ids)

    def spell(self, text: str) -> list[int]:
        """Byte by byte, so that no marker is a token."""
        return [token_id for character in text for token_id in self.ids(character)]

    def ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def id_of(self, token: str) -> int:
        (token_id,) = self.ids(token)
        return token_id

    def write(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id in allowed(self.matcher), f"{self.backend.id_to_token(token_id)!r} is masked"
            self.grammars.advance([self.matcher], [token_id])

    @property
    def allowed(self) -> set[int]:
        return {token_id for token_id in allowed(self.matcher) if token_id < self.backend.get_vocab_size()}

    @property
    def all_ids(self) -> set[int]:
        return set(range(self.backend.get_vocab_size()))


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("is_spelled", [True, False])
def test_tokens_are_free_until_the_end_and_the_forms_after_it(has_markers: bool, is_spelled: bool) -> None:
    writer = Writer(form(choice=["kq", "x"], **OPENED), has_markers=has_markers)
    assert writer.allowed == writer.all_ids - {writer.id_of(WHOLE)}, "the end of the sequence is as free as any other"
    writer.write(writer.ids('Well {"k"] <think> é </'))
    assert EOS in writer.allowed
    writer.write(writer.spell("</think>") if is_spelled else writer.ids("</think>"))
    assert writer.allowed == set(writer.ids("k") + writer.ids("x"))
    writer.write([*writer.ids("kq"), EOS])
    assert writer.matcher.error is None


@pytest.mark.parametrize("has_markers", [True, False])
def test_an_output_that_may_open_its_reasoning_does_or_follows_the_form_from_its_first_token(has_markers: bool) -> None:
    params = form(choice=["kq", "<a"], **MAY_OPEN)
    plain, tagged, thinking = (Writer(params, has_markers=has_markers) for _ in range(3))
    opening = {plain.id_of("<think>")} if has_markers else set(plain.ids("<t")[:1])
    assert plain.allowed == set(plain.ids("k") + plain.ids("<")) | opening
    plain.write(plain.ids("k"))
    assert plain.allowed == set(plain.ids("q"))
    tagged.write(tagged.ids("<"))
    assert tagged.allowed == set(tagged.ids("a") if has_markers else tagged.ids("a") + tagged.ids("t"))
    tagged.write([*tagged.ids("a"), EOS])
    thinking.write(thinking.ids("<think>"))
    assert EOS in thinking.allowed
    thinking.write([*thinking.ids("<a, or k?</think>"), *thinking.ids("<a"), EOS])
    assert plain.matcher.error is tagged.matcher.error is thinking.matcher.error is None


def test_an_opening_may_hold_special_tokens_among_others() -> None:
    backend = make_backend(has_markers=False)
    backend.add_special_tokens([AddedToken("<|channel|>", normalized=False), AddedToken("<|message|>", normalized=False)])
    grammars = Grammars(backend.to_str, backend.get_vocab_size(), [EOS])
    params = form(choice=["kq"], reasoning_start="<|channel|>thought<|message|>", reasoning_end="<|channel|>answer<|message|>")
    grammars.prepare(params)
    matcher = grammars.open(params, [])
    said = backend.encode("<|channel|>thought<|message|>so<|channel|>answer<|message|>kq", add_special_tokens=False).ids
    for token_id in [*said, EOS]:
        assert token_id in allowed(matcher), f"{backend.id_to_token(token_id)!r} is masked"
        grammars.advance([matcher], [token_id])
    assert matcher.reasoning is None


def test_an_opening_that_has_begun_has_to_go_on_where_the_form_has_no_such_beginning() -> None:
    writer = Writer(form(choice=["kq"], **MAY_OPEN), has_markers=False)
    writer.write(writer.ids("<th"))
    assert writer.allowed == set(writer.ids("i"))


@pytest.mark.parametrize("has_markers", [True, False])
def test_a_token_never_carries_the_last_of_the_end_and_the_first_of_the_answer(has_markers: bool) -> None:
    writer = Writer(form(regex="x+", **OPENED), has_markers=has_markers)
    assert writer.id_of(OVERRUNNING) in writer.allowed
    writer.write(writer.spell("so </think"))
    assert writer.all_ids - writer.allowed == {writer.id_of(OVERRUNNING), writer.id_of(WHOLE)}
    writer.write([writer.id_of(HARMLESS)])
    assert writer.allowed == set(writer.ids("x")), "line breaks after the end belong to nothing"


@pytest.mark.parametrize("has_markers", [True, False])
@settings(deadline=None, max_examples=40)
@given(data=st.data(), pieces=st.lists(st.sampled_from(["<", "</", "think", ">", "a", "</think", "<think>", "é"]), max_size=8))
def test_wherever_an_output_is_taken_up_again_it_stands_where_it_stood(has_markers: bool, data: st.DataObject, pieces: list[str]) -> None:
    params = form(choice=["kq", "<a>"], **data.draw(st.sampled_from([OPENED, MAY_OPEN])))
    writer = Writer(params, has_markers=has_markers)
    start = "<think>" if params.reasoning_start else ""
    token_ids = writer.ids(start + "".join(pieces) + data.draw(st.sampled_from(["", "</think>", "</think>k", "</think><a"])))
    for token_id in token_ids:
        writer.grammars.advance([writer.matcher], [token_id])
    again = Writer(params, token_ids, has_markers=has_markers)
    assert again.allowed == writer.allowed
    assert (again.matcher.error is None) == (writer.matcher.error is None)


def test_rows_that_reason_and_rows_that_do_not_move_in_one_step() -> None:
    writers = [Writer(form(regex="(kq)+", **fields), has_markers=True) for fields in (OPENED, {}, MAY_OPEN)]
    k, q, end, start = (writers[0].id_of(token) for token in ("k", "q", "</think>", "<think>"))
    matchers = [writer.matcher for writer in writers]
    for token_ids in ([q, k, start], [end, q, q], [k, k, end]):
        GRAMMARS[True].advance(matchers, token_ids)
    assert [writer.allowed for writer in writers] == [{q}, {q}, {k}]


def test_a_mask_is_made_once_for_each_place_in_the_end() -> None:
    """A short end forbids much of a vocabulary, and each step of each output asks for a mask."""
    one, other = (Writer(form(choice=["kq"], reasoning_end=">"), has_markers=True) for _ in range(2))
    first = one.matcher.mask()
    assert one.all_ids - one.allowed == {one.id_of(OVERRUNNING), one.id_of(WHOLE)}
    one.write(one.ids("a"))
    assert one.matcher.mask() is first
    assert other.matcher.mask() is first


def test_ends_are_not_kept_for_ever() -> None:
    grammars = GRAMMARS[True]
    for index in range(2 * MAX_KEPT_ENDS):
        grammars.prepare(form(choice=["kq"], reasoning_end=f"[{index}]"))
    assert len(grammars._ends) == MAX_KEPT_ENDS
    writer = Writer(form(choice=["kq"], reasoning_end="[0]"), has_markers=True)
    writer.write([*writer.ids("a [0]"), *writer.ids("kq"), EOS])
    assert Writer(form(choice=["kq"]), has_markers=True).allowed == set(writer.ids("k"))
