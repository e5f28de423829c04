"""Engines that leave, and fronts that wait for another one; and what an engine without a socket is spared."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pagedcore import AsyncEngine
from pagedcore.errors import EngineClosedError, EngineUnreachableError
from pagedcore.outputs import RequestOutput
from pagedcore.remote import frames
from pagedcore.remote.frames import Add
from support.core_builders import make_request
from support.engine_builder import expected_tokens, make_engine
from support.remote_engines import ENDLESS, GREEDY, Hosted, connected, greeted, host, hosted, raw_front, run, short_folder, wait_for
from support.repository import ROOT


def test_a_draining_engine_finishes_what_runs_and_takes_nothing_new(one: Hosted) -> None:
    one.built.runner.gate.clear()
    with connected(one) as front:
        outputs: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: outputs.extend(front.generate_sync([1], GREEDY)))
        thread.start()
        wait_for(lambda: one.server.num_open == 1, "it is there")
        one.server.begin_drain()
        wait_for(lambda: not asyncio.run(front.is_ready()), "the front knows")
        with pytest.raises(EngineClosedError, match="draining"):
            next(front.generate_sync([2], GREEDY))
        channel = greeted(raw_front(one))  # one that comes late, and does not listen
        assert isinstance(frames.decode_from_engine(channel.read() or b""), frames.Refusal)
        channel.put(Add(make_request("late", [1])))
        (item,) = frames.decode_from_engine(channel.read() or b"").items
        assert item.facts.error.kind == "EngineClosedError"
        channel.close()
        one.built.runner.gate.set()
        thread.join(60.0)
        assert outputs[-1].outputs[0].token_ids == expected_tokens([1], 12)
        wait_for(lambda: one.server.num_open == 0, "nothing is open")


def test_fronts_come_back_when_an_engine_of_the_same_model_does() -> None:
    with short_folder() as folder:
        first = host(folder / "e.sock")
        front = first.connect()
        stream = front.generate_sync([1], ENDLESS)
        next(stream)
        first.close()
        *_, last = stream
        assert last.status == "aborted"
        wait_for(lambda: not asyncio.run(front.is_ready()), "the front knows")
        assert asyncio.run(front.is_alive()), "it waits for another engine"
        with pytest.raises(EngineClosedError) as caught:
            next(front.generate_sync([1], GREEDY))
        assert caught.value.retry_after_s > 0
        with pytest.raises(EngineClosedError):
            asyncio.run(front.check_health())
        second = host(folder / "e.sock")
        wait_for(lambda: asyncio.run(front.is_ready()), "the front is back")
        assert run(front, [1]).outputs[0].token_ids == expected_tokens([1], 12)
        front.close_sync()
        second.close()


def test_an_engine_of_another_model_is_not_taken_for_the_old_one() -> None:
    with short_folder() as folder:
        first = host(folder / "e.sock")
        front = first.connect()
        first.close()
        second = host(folder / "e.sock", max_model_len=128)
        wait_for(lambda: not front.loop.is_alive, "the front gives up")
        with pytest.raises(EngineClosedError, match="another model than before; connect anew"):
            front.stats()
        front.close_sync()
        second.close()


def test_connecting_waits_as_long_as_it_is_told() -> None:
    with short_folder() as folder:
        with pytest.raises(EngineUnreachableError):
            AsyncEngine.connect(folder / "e.sock")
        started: list[Hosted] = []
        timer = threading.Timer(0.2, lambda: started.append(host(folder / "e.sock")))
        timer.start()
        front = AsyncEngine.connect(folder / "e.sock", timeout_s=20.0)
        assert run(front, [1]).status == "completed"
        front.close_sync()
        timer.join()
        started[0].close()


def test_requests_that_a_closed_engine_still_had_end_with_it() -> None:
    with hosted() as one, connected(one) as front:
        stream = front.generate_sync([1], ENDLESS)
        next(stream)
        one.built.engine.close_sync()
        *_, last = stream
        assert last.status == "aborted"
        last = run(front, [1])
        assert isinstance(last.error, EngineClosedError)


def test_an_engine_in_this_process_has_no_remote_part() -> None:
    built = make_engine()
    assert built.engine.loop is built.loop
    built.engine.close_sync()


def test_the_room_needs_no_torch_and_no_metrics_library_to_be_imported() -> None:
    names = [path.stem for path in Path(frames.__file__).parent.glob("*.py") if path.stem != "__init__"]
    code = (
        f"import sys, importlib; [importlib.import_module('pagedcore.remote.' + name) for name in {names}]\n"
        "assert not {'torch', 'prometheus_client', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    code = "import sys; import pagedcore, pagedcore.async_engine; assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
