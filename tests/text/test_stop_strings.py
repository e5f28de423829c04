"""Stop strings: nothing leaks, nothing is lost, and the cut into tokens does not matter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedcore.text.stop import StopStrings

SMALL_TEXTS = st.text(alphabet="ab.", max_size=24)
STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), max_size=4)


def run(stops: Sequence[str], pieces: Sequence[str], *, include_stop: bool = False) -> tuple[str, str | None, list[str]]:
    """All text, the stop string that was found, and the text given out by each push."""
    matcher = StopStrings(stops, include_stop=include_stop)
    emitted: list[str] = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted.append(text)
        if matched is not None:
            return "".join(emitted), matched, emitted
    emitted.append(matcher.finish())
    return "".join(emitted), None, emitted


def expected(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """By definition: the first end of any stop string; of those that end there, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=STOPS, pieces=st.lists(SMALL_TEXTS, max_size=8))
@example(stops=["aab"], pieces=["a", "a", "a", "b"])
@example(stops=["ab", "b"], pieces=["ab"])
@example(stops=["abab."], pieces=["abab", "ab."])
def test_the_result_is_that_of_the_whole_text_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    text, matched, _ = run(stops, pieces)
    assert (text, matched) == expected(stops, "".join(pieces))


@given(stops=STOPS, pieces=st.lists(SMALL_TEXTS, max_size=8))
def test_exactly_the_longest_beginning_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    pushed = shown = ""
    for piece in pieces:
        pushed += piece
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            return
        held = max((start for start in beginnings if pushed.endswith(start)), key=len, default="")
        assert shown + held == pushed


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one END")])
def test_the_stop_string_is_part_of_the_text_only_when_it_is_asked_for(include: bool, text: str) -> None:
    assert run(["END"], ["one E", "N", "D two"], include_stop=include)[:2] == (text, "END")


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert run(["\n\nUser:"], ["Hi", "\n", "\nUs", "ual", " end"])[2] == ["Hi", "", "", "\n\nUsual", " end", ""]


def test_text_held_back_at_the_end_is_given_out() -> None:
    assert run(["STOP"], ["go ST"])[:2] == ("go ST", None)


def test_a_long_stop_string_costs_no_more_than_the_text_is_long() -> None:
    # One comparison a character on average: a quadratic search would make 10^9 of them here.
    stop = "a" * 100_000 + "b"
    text, matched, _ = run([stop], ["a"] * 100_000 + ["a", "b", "c"])
    assert (text, matched) == ("a", stop)
