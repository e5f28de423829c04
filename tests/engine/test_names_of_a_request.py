"""What a request is called goes into scrapes, logs and pages: text that UTF-8 has no form for would break them for everybody."""

from __future__ import annotations

import pytest

from pagedcore import SamplingParams
from pagedcore.client import MAX_USER_CHARS, RequestContext, named_user
from pagedcore.errors import InvalidRequestError
from support.engine_builder import make_engine

HALF_A_PAIR = "x\ud800"


@pytest.mark.parametrize("name", ["tenant", "cache_salt", "request_class", "adapter"])
def test_half_a_surrogate_pair_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is .*half a surrogate pair") as refused:
        RequestContext(**{name: HALF_A_PAIR})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert getattr(RequestContext(**{name: "größe 😀"}), name) == "größe 😀"  # type: ignore[arg-type]


def test_so_is_it_in_the_id_of_a_request() -> None:
    engine = make_engine().engine
    try:
        with pytest.raises(InvalidRequestError, match="request_id is"):
            list(engine.generate_sync([1, 2, 3], SamplingParams(max_tokens=1), HALF_A_PAIR))
        (*_, last) = engine.generate_sync([1, 2, 3], SamplingParams(max_tokens=1), "größe 😀")
        assert (last.request_id, last.status) == ("größe 😀", "completed")
    finally:
        engine.close_sync()


@pytest.mark.parametrize("wrong", [7, b"x", None])
def test_what_is_no_text_is_refused_too(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="adapter must be text"):
        RequestContext(adapter=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("user", "safety_identifier", "named"),
    [
        ("ada", None, "ada"),
        (None, "grace", "grace"),
        ("ada", "grace", "ada"),
        ("", "grace", "grace"),
        ("ada", "", "ada"),
        ("", "", None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_an_empty_name_of_a_user_is_no_name(user: str | None, safety_identifier: str | None, named: str | None) -> None:
    assert named_user(user, safety_identifier) == named


def test_a_long_name_of_a_user_is_cut_with_a_mark_and_keeps_both_ends() -> None:
    """Where names of users differ they do so at the end more often than not."""
    whole = "u" * MAX_USER_CHARS
    assert named_user(whole, None) == whole
    ada, grace = (named_user("team/" + "x" * MAX_USER_CHARS + name, None) or "" for name in ("/ada", "/grace"))
    assert [len(name) for name in (ada, grace)] == [MAX_USER_CHARS] * 2
    assert ada.startswith("team/x")
    assert ada.endswith("x/ada")
    assert "x...x" in ada
    assert ada != grace
