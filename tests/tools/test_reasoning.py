"""What a model thinks is told apart from its answer, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.tools.reasoning import ReasoningParser, thinks

OPENED = "<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>assistant\n"


def split(prompt: str, pieces: Iterable[str]) -> tuple[str, str]:
    """(reasoning, answer)."""
    parser = ReasoningParser(prompt)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text for part in parts)
    return "".join(p.text for p in parts if p.is_reasoning), "".join(p.text for p in parts if not p.is_reasoning)


CASES = [
    (PLAIN, "<think>\nLet me see. </think>\n\nYes. ", ("Let me see.", "Yes. ")),
    (PLAIN, "\n<think></think>Yes", ("", "Yes")),
    (PLAIN, " Yes", ("", " Yes")),
    (PLAIN, "<thin", ("", "<thin")),
    (PLAIN, "Yes <think>no</think>", ("", "Yes <think>no</think>")),
    (PLAIN, "<think>a </thin", ("a </thin", "")),
    (PLAIN, "", ("", "")),
    (OPENED, "Let me see.\n</think>\n\nYes", ("Let me see.", "Yes")),
    (OPENED, "cut off ", ("cut off", "")),
    (OPENED + "\n</think>\n\n", "Yes", ("", "Yes")),
]


@pytest.mark.parametrize(("prompt", "text", "expected"), CASES)
def test_reasoning_and_answer_are_told_apart(prompt: str, text: str, expected: tuple[str, str]) -> None:
    assert split(prompt, [text]) == split(prompt, text) == expected


@given(st.sampled_from([PLAIN, OPENED]), st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", " ", "\n", "a"])), st.data())
def test_it_does_not_matter_where_the_text_is_cut(prompt: str, pieces: list[str], data: Any) -> None:
    text = "".join(pieces)
    cut = data.draw(st.integers(0, len(text)))
    assert split(prompt, [text[:cut], text[cut:]]) == split(prompt, [text]) == split(prompt, text)


def test_a_template_says_whether_its_model_thinks() -> None:
    assert thinks("{% if '</think>' in content %}")
    assert not thinks("{{ messages }}")
    assert not thinks(None)
