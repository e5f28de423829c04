"""A full garbage collection halts every thread; what lives as long as an engine is left out of it, and only as long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pagedcore import AsyncEngine
from pagedcore.garbage import YOUNG_OBJECTS, GarbageHold
from support.engine_builder import make_loop

TAKE = GarbageHold.take
"""As it is outside of tests."""


class _Node:
    """One object of a cycle."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_other_tests_is_gone() -> Iterator[None]:
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GarbageHold, "take", TAKE)
    yield
    gc.unfreeze()


def _is_frozen(node: _Node) -> bool:
    """Whether collections leave it out. Counts would not do: frozen objects of other threads may die at any time."""
    return not any(thing is node for thing in gc.get_objects())


def test_what_exists_is_not_walked_over_until_the_last_hold_is_released() -> None:
    first, second = GarbageHold(), GarbageHold()
    node = _Node()
    first.take()
    assert _is_frozen(node)
    second.take()
    first.release()
    assert _is_frozen(node)
    second.release()
    assert gc.get_freeze_count() == 0


def test_a_hold_may_be_taken_and_released_twice() -> None:
    hold, other = GarbageHold(), GarbageHold()
    hold.take()
    node = _Node()
    hold.take()
    assert not _is_frozen(node), "a second take freezes nothing more"
    other.take()
    hold.release()
    hold.release()
    assert _is_frozen(node), "the other still holds"
    other.release()
    assert not _is_frozen(node)


def test_garbage_from_before_goes_at_once_and_garbage_from_within_after_the_last_release() -> None:
    before, hold = _Node(), GarbageHold()
    is_before_alive = weakref.ref(before)
    del before
    within = _Node()
    is_within_alive = weakref.ref(within)
    hold.take()
    assert is_before_alive() is None
    del within
    gc.collect()
    assert is_within_alive() is not None
    hold.release()
    gc.collect()
    assert is_within_alive() is None


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_young_objects_are_collected_less_often_while_an_engine_lives() -> None:
    gc.set_threshold(700, 9, 8)
    first, second = GarbageHold(), GarbageHold()
    first.take()
    second.take()
    assert gc.get_threshold() == (YOUNG_OBJECTS, 9, 8)
    first.release()
    assert gc.get_threshold() == (YOUNG_OBJECTS, 9, 8)
    second.release()
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("of_host", [0, YOUNG_OBJECTS + 1])
def test_a_host_that_collects_less_often_or_never_is_left_alone(of_host: int) -> None:
    gc.set_threshold(of_host, 10, 10)
    hold = GarbageHold()
    hold.take()
    assert gc.get_threshold() == (of_host, 10, 10)
    hold.release()
    assert gc.get_threshold() == (of_host, 10, 10)


@pytest.mark.usefixtures("thresholds")
def test_what_the_host_sets_while_an_engine_lives_stays() -> None:
    hold = GarbageHold()
    hold.take()
    gc.set_threshold(1234, 10, 10)
    hold.release()
    assert gc.get_threshold() == (1234, 10, 10)
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)  # the host's own choice now
    hold.take()
    hold.release()
    assert gc.get_threshold() == (YOUNG_OBJECTS, 10, 10)


def test_an_engine_holds_from_its_warm_up_to_its_end() -> None:
    loop, _ = make_loop()
    node = _Node()
    engine = AsyncEngine(loop=loop)
    assert _is_frozen(node)
    engine.warm_up()
    engine.close_sync()
    assert gc.get_freeze_count() == 0


def test_a_forgotten_engine_lets_go_without_a_collection() -> None:
    loop, runner = make_loop()
    gc.disable()
    try:
        AsyncEngine(loop=loop)
        assert runner.is_closed
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_taking_a_hold_may_end_an_engine_that_was_forgotten_in_a_cycle(caplog: pytest.LogCaptureFixture) -> None:
    loop, runner = make_loop()
    engine = AsyncEngine(loop=loop)
    cycle = _Node()
    cycle.engine = engine
    del engine, cycle
    hold = GarbageHold()
    hold.take()
    assert runner.is_closed
    assert "left behind" not in caplog.text, "nobody waited for the other"
    hold.release()


def test_a_hold_that_was_not_taken_leaves_the_hosts_own_freeze_alone() -> None:
    node = _Node()
    gc.freeze()
    GarbageHold().release()
    assert _is_frozen(node)
