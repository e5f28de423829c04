"""Ctrl-C in a sync LangChain batch: the batch and its requests end, whenever it comes."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate

from pagedcore import AsyncEngine
from pagedcore_adapters._langchain_batch import Batch
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from support.fake_engine import FakeLoop, make_fake_engine

Fake = tuple[AsyncEngine, FakeLoop]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    engine, loop = make_fake_engine(tmp_path)
    yield engine, loop
    engine.close_sync()


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pagedcore-batch") and thread.is_alive()]


SYNC_BATCHES: dict[str, Callable[[Any], object]] = {
    "batch": lambda model: model.batch(["a"] * 8),
    "as completed": lambda model: list(model.batch_as_completed(["a"] * 8)),
    "limited": lambda model: model.batch(["a"] * 8, {"max_concurrency": 3}),
    "exceptions": lambda model: model.batch(["a"] * 8, return_exceptions=True),
    "chain": lambda model: (ChatPromptTemplate.from_template("{x}") | model).batch([{"x": "a"}] * 8),
    "generate": lambda model: model.generate([[HumanMessage("a")]] * 8 if isinstance(model, ChatPagedCore) else ["a"] * 8),
}


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])
@pytest.mark.parametrize("run", SYNC_BATCHES.values(), ids=SYNC_BATCHES)
@pytest.mark.parametrize("press", [press_ctrl_c, _thread.interrupt_main], ids=["asleep", "falling asleep"])
def test_ctrl_c_ends_a_sync_batch_at_once_and_its_requests_with_it(
    fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM], run: Callable[[Any], object], press: Callable[[], None]
) -> None:
    """One that comes as the main thread falls asleep wakes nobody up; `interrupt_main` is that one."""
    engine, loop = fake

    def interrupt() -> None:
        assert loop.wait_until(lambda: loop.num_running >= 3)
        press()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(kind(engine=engine, max_tokens=10**9))
    assert loop.wait_until(lambda: loop.num_running == 0)
    for thread in waiting_threads():
        thread.join(10)
        assert not thread.is_alive()
    assert set(loop.aborted) == {request.request_id for request in loop.requests}
    assert engine.front.num_open == 0


def test_a_batch_within_a_batch_ends_with_it(fake: Fake) -> None:
    engine, loop = fake
    model = PagedCoreLLM(engine=engine, max_tokens=10**9)
    batch = Batch(1)
    with pytest.raises(KeyboardInterrupt), batch:  # noqa: PT012
        inner = batch.submit(model.batch, ["a", "b"])
        assert loop.wait_until(lambda: loop.num_running == 2)
        raise KeyboardInterrupt
    assert isinstance(inner.exception(30), CancelledError)
    assert loop.wait_until(lambda: loop.num_running == 0)


def test_a_request_that_begins_after_ctrl_c_is_not_begun(fake: Fake) -> None:
    engine, loop = fake
    interrupted, batch = threading.Event(), Batch(1)
    with pytest.raises(KeyboardInterrupt), batch:  # noqa: PT012
        late = batch.submit(lambda: (interrupted.wait(), ChatPagedCore(engine=engine).invoke("a")))
        raise KeyboardInterrupt
    interrupted.set()
    with pytest.raises(CancelledError):
        late.result(10)
    assert loop.requests == []
