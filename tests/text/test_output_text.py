"""One choice's text in the front: deltas, stop strings and the number of tokens that belong to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.errors import InvalidRequestError
from pagedcore.sampling_params import SamplingParams
from pagedcore.text.chat_template import ChatTemplate
from pagedcore.text.output_text import ChoiceText, TextDelta
from pagedcore.text.tokenizer import Tokenizer
from support.small_tokenizers import make_byte_level

TOKENIZER = Tokenizer(make_byte_level(), {}, ChatTemplate({}))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(pieces: Sequence[Sequence[int]], **params: object) -> list[TextDelta]:
    choice = ChoiceText(TOKENIZER, SamplingParams(**params))  # type: ignore[arg-type]
    return [choice.push(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def test_without_stop_strings_every_token_is_kept_and_the_text_is_whole() -> None:
    ids = encode("hello world 🤗")
    deltas = run([[token_id] for token_id in ids])
    assert "".join(delta.new_text for delta in deltas) == "hello world 🤗"
    assert [delta.num_tokens_kept for delta in deltas] == list(range(1, len(ids) + 1))
    assert {delta.matched_stop for delta in deltas} == {None}


def test_tokens_up_to_the_one_that_completes_the_stop_string_are_kept() -> None:
    before, stop, after = encode("hello"), encode(" stop"), encode(" world bad")
    assert len(before) == len(stop) == 1
    (delta,) = run([[*before, *stop, *after]], stop=[" st"])
    assert delta == TextDelta("hello", " st", 2)


def test_a_stop_string_need_not_lie_on_token_borders() -> None:
    ids = encode("hello my world")
    deltas = run([[token_id] for token_id in ids], stop=["lo m"])
    assert "".join(delta.new_text for delta in deltas) == "hel"
    assert deltas[1].matched_stop == "lo m"
    assert deltas[1].num_tokens_kept == 2


def test_a_stop_string_can_be_kept_in_the_text() -> None:
    (delta,) = run([encode("hello my world")], stop=["lo m"], include_stop_str_in_output=True)
    assert delta == TextDelta("hello m", "lo m", 2)


@pytest.mark.parametrize(
    ("min_tokens", "text", "matched"),
    [
        (0, "a", "b"),
        (1, "a", "b"),  # the second token holds the stop string, and one token comes before it
        (2, "aba", "b"),
        (3, "aba", "b"),
        (4, "ababa", None),
    ],
)
def test_stop_strings_are_looked_for_behind_the_first_min_tokens(min_tokens: int, text: str, matched: str | None) -> None:
    ids = [encode(char)[0] for char in "ababa"]
    deltas = run([[token_id] for token_id in ids], stop=["b"], min_tokens=min_tokens)
    assert "".join(delta.new_text for delta in deltas) == text
    assert deltas[-1].matched_stop == matched


def test_a_stop_string_that_begins_in_the_first_min_tokens_does_not_end_the_text() -> None:
    ids = [encode(char)[0] for char in "xyz"]
    assert "".join(delta.new_text for delta in run([[token_id] for token_id in ids], stop=["xy"], min_tokens=1)) == "xyz"


def test_what_comes_after_a_stop_string_adds_nothing() -> None:
    choice = ChoiceText(TOKENIZER, SamplingParams(stop=["world"]))
    assert choice.push(encode("hello world"), False) == TextDelta("hello ", "world", 2)
    assert choice.push(encode(" my stop"), True) == TextDelta("", "world", 2)


def test_text_held_back_is_given_out_when_the_choice_ends() -> None:
    choice = ChoiceText(TOKENIZER, SamplingParams(stop=["world!"]))
    assert choice.push(encode("hello world"), False).new_text == "hello "
    assert choice.push([], True) == TextDelta("world", None, 2)


def test_a_broken_character_at_the_end_comes_with_the_last_delta() -> None:
    ids = encode("é")
    choice = ChoiceText(TOKENIZER, SamplingParams())
    assert choice.push(ids[:1], False).new_text == ""
    assert choice.push([], True).new_text == "\ufffd"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
def test_without_text_tokens_are_still_counted(tokenizer: Tokenizer | None) -> None:
    choice = ChoiceText(tokenizer, SamplingParams(detokenize=False))
    assert choice.push([5, 6], False) == TextDelta("", None, 2)
    assert choice.push([7], True) == TextDelta("", None, 3)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        ChoiceText(None, SamplingParams(stop=["x"]))


@given(
    text=st.text(alphabet="helo wrd🤗.", max_size=30),
    stops=st.lists(st.text(alphabet="helo wrd🤗.", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_bursts_give_the_same_as_tokens_one_by_one(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = encode(text)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut <= len(ids))})
    bursts = [ids[a:b] for a, b in itertools.pairwise(borders)] or [[]]
    single = run([[token_id] for token_id in ids] or [[]], stop=stops)
    burst = run(bursts, stop=stops)
    assert "".join(delta.new_text for delta in burst) == "".join(delta.new_text for delta in single)
    assert burst[-1][1:] == single[-1][1:]
