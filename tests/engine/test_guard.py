"""Faults that belong to nobody: what gets out, and what the log says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pagedcore import guard as guarding
from pagedcore.guard import MAX_QUIET, QUIET_S, Guard


def raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_fault_is_logged_again_for_another_type_another_function_and_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard, now_s, is_odd = Guard("It could not be done."), [5.0], [False]
    monkeypatch.setattr(guarding, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def one() -> None:
        raise TypeError if is_odd[0] else KeyError

    def num_logged(*functions: Callable[[], None]) -> int:
        before = len(caplog.records)
        assert not any(guard(function) for function in functions)
        return len(caplog.records) - before

    other = raiser(KeyError())
    assert num_logged(one, one, one) == 1
    assert num_logged(other, one, other) == 1, "the other function"
    is_odd[0] = True
    assert num_logged(one, one, other) == 1, "the other type"
    now_s[0] += QUIET_S - 1
    assert num_logged(one, other) == 0
    now_s[0] += 1
    assert num_logged(one, one, other, other) == 2, "a minute later"
    assert "It could not be done." in caplog.text
    assert "one at 0x" in caplog.text, "and it is named"


def test_a_guard_remembers_no_more_functions_than_it_may() -> None:
    guard, functions = Guard("It could not be done."), [raiser(KeyError()) for _ in range(MAX_QUIET + 5)]
    for function in functions:
        guard(function)
    assert len(guard._quiet_until_s) == 5


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_ends_a_program_gets_out_on_the_main_thread_alone(error: BaseException) -> None:
    guard, results = Guard("It could not be done."), []
    thread = threading.Thread(target=lambda: results.append(guard(raiser(error))))
    thread.start()
    thread.join(60)
    assert results == [False]
    with pytest.raises(type(error)):
        guard(raiser(error))


def test_of_many_items_those_that_fail_cost_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    guard, taken = Guard("It could not be done."), []

    def take(item: int) -> None:
        if item % 3 == 0:
            raise KeyError(item)
        taken.append(item)

    guard.each(take, range(10))
    guard.each(take, iter([0]))
    guard.each(take, [])
    assert taken == [1, 2, 4, 5, 7, 8]
    assert len(caplog.records) == 1
