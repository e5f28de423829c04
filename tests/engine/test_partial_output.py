"""What a choice has so far: outputs that were made of it stay as they were, however late and in whatever order somebody looks."""

from __future__ import annotations

import copy
import dataclasses
import pickle  # noqa: TID251 - callers may pickle what they got
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.outputs import CompletionOutput, Logprob
from pagedcore.partial_output import ChoiceSoFar, PartialOutput

PIECES = st.lists(st.text(max_size=4), min_size=1, max_size=12)


def outputs_of(pieces: list[str]) -> list[CompletionOutput]:
    """One for each piece, the last one with the end; token i comes with piece i."""
    so_far = ChoiceSoFar(3, has_logprobs=False)
    outputs: list[CompletionOutput] = []
    for token, piece in enumerate(pieces):
        so_far.add([token], piece)
        outputs.append(so_far.partial() if token + 1 < len(pieces) else so_far.last("stop", None))
    return outputs


def expected(pieces: list[str]) -> list[CompletionOutput]:
    return [
        CompletionOutput(
            3,
            "".join(pieces[: count + 1]),
            list(range(count + 1)),
            finish_reason="stop" if count + 1 == len(pieces) else None,
            new_text=pieces[count],
            new_token_ids=[count],
        )
        for count in range(len(pieces))
    ]


@given(pieces=PIECES, order=st.randoms(use_true_random=False))
def test_outputs_are_what_copies_of_everything_would_be_in_whatever_order_they_are_looked_at(pieces: list[str], order: object) -> None:
    outputs, wanted = outputs_of(pieces), expected(pieces)
    numbers = list(range(len(pieces)))
    order.shuffle(numbers)  # type: ignore[attr-defined]
    for number in numbers:
        assert outputs[number] == wanted[number]
        assert wanted[number] == outputs[number]


def test_several_steps_that_nobody_looked_at_are_new_together() -> None:
    so_far = ChoiceSoFar(0, has_logprobs=False)
    so_far.add([1], "a")
    so_far.partial()
    so_far.add([2], "")
    so_far.add([3, 4], "bc")
    so_far.add([5], "d")
    output = so_far.partial()
    assert (output.new_text, output.new_token_ids, output.text) == ("bcd", [2, 3, 4, 5], "abcd")
    assert (so_far.partial().new_text, so_far.partial().new_token_ids) == ("", [])


def test_log_probabilities_are_those_of_the_tokens_so_far_and_copied_when_somebody_looks() -> None:
    so_far = ChoiceSoFar(0, has_logprobs=True)
    assert so_far.logprobs is not None
    outputs = []
    for token in range(3):
        so_far.add([token], "a")
        so_far.logprobs.append({token: Logprob(-0.5, 1, "a")})
        outputs.append(so_far.partial())
    assert all("logprobs" not in made(output) for output in outputs)
    assert [[*map(list, output.logprobs or ())] for output in outputs] == [[[0]], [[0], [1]], [[0], [1], [2]]]
    assert all("logprobs" in made(output) for output in outputs)


def made(output: CompletionOutput) -> set[str]:
    """Fields that have a value, without making one."""
    found = set()
    for name in CompletionOutput.__match_args__:
        with suppress(AttributeError):
            object.__getattribute__(output, name)
            found.add(name)
    return found


def test_a_readers_lists_are_the_readers_own() -> None:
    first, second, last = outputs_of(["a", "b", "c"])
    first.token_ids.append(99)
    first.new_token_ids.clear()
    first.text = "mine"
    assert (first.text, first.token_ids, first.new_token_ids) == ("mine", [0, 99], [])
    assert (second.token_ids, last.token_ids, last.text) == ([0, 1], [0, 1, 2], "abc")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output)), dataclasses.replace])
def test_a_copy_is_an_output_of_values(copied: object) -> None:
    output = outputs_of(["a", "b", "c"])[1]
    again = copied(output)  # type: ignore[operator]
    assert type(again) is PartialOutput
    assert again == expected(["a", "b", "c"])[1]
    assert repr(again) == repr(output)
    assert dataclasses.asdict(again) == dataclasses.asdict(output)
    assert not hasattr(again, "_so_far")


def test_what_no_output_has_is_no_attribute() -> None:
    output = outputs_of(["a", "b"])[0]
    with pytest.raises(AttributeError, match="'PartialOutput' object has no attribute 'texts'"):
        output.texts  # type: ignore[attr-defined]  # noqa: B018
    assert not output.finished


def test_other_threads_may_look_while_the_choice_grows() -> None:
    so_far, outputs, wrong = ChoiceSoFar(0, has_logprobs=False), list[PartialOutput](), list[tuple[int, str]]()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for count, output in enumerate(list(outputs), 1):
                if output.text != "ab" * count or output.token_ids != [7] * count:
                    wrong.append((count, output.text))

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(400):
        so_far.add([7], "ab")
        outputs.append(so_far.partial())
    is_over.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert so_far.text(400) == "ab" * 400
