"""Matchers move by their worker, rows of a step together; a mask is waited for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from pagedcore.grammar.grammars import Grammars
from pagedcore.grammar.matcher import Matcher
from support.grammars import EOS, allowed, form, ids_of, make_grammars

AB = form(regex="(kq)+")
A, B = ids_of("k")[0], ids_of("q")[0]


@pytest.fixture
def grammars() -> Grammars:
    made = make_grammars()
    made.prepare(AB)
    return made


def test_rows_of_one_step_move_by_their_own_tokens(grammars: Grammars) -> None:
    matchers = [grammars.open(AB, []) for _ in range(3)]
    grammars.advance(matchers[:2], [A, A])
    grammars.advance(matchers[:1], [B])
    assert [allowed(matcher) for matcher in matchers] == [{A, EOS}, {B}, {A}]


def test_an_output_that_goes_on_begins_where_it_was(grammars: Grammars) -> None:
    whole = grammars.open(AB, [])
    for token in ids_of("kqk"):
        grammars.advance([whole], [token])
    again = grammars.open(AB, ids_of("kqk"))
    assert allowed(again) == allowed(whole) == {B}


def test_when_all_is_said_only_the_end_may_follow() -> None:
    grammars = make_grammars()
    params = form(choice=["kq"])
    grammars.prepare(params)
    matcher = grammars.open(params, ids_of("kq"))
    assert allowed(matcher) == {EOS}
    grammars.advance([matcher], [EOS])
    assert matcher.mask() is not None
    assert matcher.error is None


def test_a_token_that_does_not_follow_ends_the_output_with_its_reason_and_no_other(grammars: Grammars) -> None:
    wrong, right = grammars.open(AB, []), grammars.open(AB, [])
    grammars.advance([wrong, right], [B, A])
    assert allowed(wrong) == set()
    assert wrong.error is not None
    assert "doesn't satisfy the grammar" in wrong.error
    assert (allowed(right), right.error) == ({B}, None)
    grammars.advance([wrong, right], [A, B])
    assert (allowed(wrong), allowed(right)) == (set(), {A, EOS})


def test_history_that_does_not_follow_is_an_error_too(grammars: Grammars) -> None:
    matcher = grammars.open(AB, [B])
    assert allowed(matcher) == set()
    assert matcher.error is not None


def test_a_grammar_that_cannot_be_compiled_any_more_is_an_error_of_the_output() -> None:
    grammars = make_grammars()
    matcher = grammars.open(form(json={"type": "strin"}), [])
    assert allowed(matcher) == set()
    assert matcher.error is not None
    assert "Invalid type" in matcher.error
    grammars.advance([matcher], [A])
    assert allowed(matcher) == set()


def test_who_asks_for_a_mask_waits_until_it_is_computed() -> None:
    matcher = Matcher(8)
    matcher.pending = Future()
    matcher.pending.set_exception(RuntimeError("the worker failed"))
    with pytest.raises(RuntimeError, match="the worker failed"):
        matcher.mask()
