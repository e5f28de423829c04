"""An engine from its start to its end: nobody waits for ever, nothing is kept, one caller's fault is no other's."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import pagedcore.async_engine
from pagedcore.async_engine import AsyncEngine
from pagedcore.core.step import PendingStep, StepPlan, StepResult
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import ConfigError, EngineClosedError, PromptTooLongError, QueueFullError, StepFailedError
from pagedcore.front import INLINE_PROMPT_LENGTH
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import Built, GatedRunner, expected_tokens, make_engine, make_loop

PROMPT = list(range(1, 21))
SHORT = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=200, temperature=0.0)


def last_of(built: Built, params: SamplingParams = SHORT) -> RequestOutput:
    return list(built.engine.generate_sync(PROMPT, params))[-1]


def add_request(request_id: str) -> AddRequest:
    return AddRequest(request_id=request_id, group_id=request_id, prompt_token_ids=PROMPT, params=SHORT.replace(seed=0), arrival_s=0.0)


def test_closing_an_engine_that_never_started_answers_whoever_waits() -> None:
    loop, runner = make_loop()
    updates: list[RequestUpdate] = []
    loop.submit(add_request("r"), updates.extend)
    future = loop.call(lambda: 1)
    loop.close()
    assert [update.finish_reason for update in updates] == ["abort"] or isinstance(updates[0].error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        future.result(0.0)
    assert runner.is_closed
    with pytest.raises(EngineClosedError):
        loop.start()


def test_what_comes_in_while_the_engine_ends_is_answered() -> None:
    built = make_engine()
    loop, answered, refused = built.loop, list[str](), list[str]()
    started = threading.Event()

    def ask(name: int) -> None:
        for number in range(300):
            try:
                loop.submit(
                    add_request(f"{name}-{number}"), lambda updates: answered.extend(u.request_id for u in updates if u.finish_reason)
                )
            except EngineClosedError:
                refused.append(f"{name}-{number}")
            if number == 20:
                started.set()

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(60.0)
    built.engine.close_sync()
    for thread in threads:
        thread.join(60.0)
    assert sorted(answered + refused) == sorted(f"{name}-{number}" for name in range(4) for number in range(300))


def test_a_device_that_hangs_does_not_hang_its_callers() -> None:
    built = make_engine(gate_open=False)
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(built.engine.generate_sync(PROMPT, LONG)))
    thread.start()
    assert built.runner.waiting.wait(60.0)
    future = built.loop.call(lambda: 1)
    built.loop.close(timeout_s=0.05)
    thread.join(60.0)
    assert isinstance(outputs[-1].error, EngineClosedError)
    assert "did not answer within 0.05 s" in str(outputs[-1].error)
    with pytest.raises(EngineClosedError):
        future.result(0.0)
    assert not built.runner.is_closed  # its memory is in use
    built.runner.gate.set()
    built.engine.close_sync()
    assert built.runner.is_closed


def test_closing_from_the_engine_thread_itself_ends_it() -> None:
    built = make_engine()
    built.loop.call(built.loop.close).result(60)
    built.loop.join(60.0)
    assert built.runner.is_closed
    assert not asyncio.run(built.engine.is_alive())


def test_whoever_closes_second_returns_when_the_engine_is_closed() -> None:
    built = make_engine(gate_open=False)
    outputs: list[RequestOutput] = []
    reader = threading.Thread(target=lambda: outputs.extend(built.engine.generate_sync(PROMPT, LONG)))
    reader.start()
    assert built.runner.waiting.wait(60.0)
    first = threading.Thread(target=built.engine.close_sync)
    first.start()
    threading.Timer(0.05, built.runner.gate.set).start()
    while asyncio.run(built.engine.is_alive()):
        pass  # the first has begun
    built.engine.close_sync()
    assert built.runner.is_closed
    first.join(60.0)
    reader.join(60.0)


def test_a_cancelled_call_does_not_stop_the_engine() -> None:
    built = make_engine(gate_open=False)
    stream = built.engine.generate_sync(PROMPT, SHORT)
    outputs: list[RequestOutput] = []
    reader = threading.Thread(target=lambda: outputs.extend(stream))
    reader.start()
    assert built.runner.waiting.wait(60.0)
    assert built.loop.call(lambda: 1).cancel()
    built.runner.gate.set()
    reader.join(60.0)
    assert outputs[-1].status == "completed"
    assert last_of(built).status == "completed"
    built.engine.close_sync()


def test_an_inbox_that_never_empties_does_not_stop_the_steps() -> None:
    built = make_engine()

    def again() -> None:
        built.loop.call(again)

    built.loop.call(again)
    assert last_of(built).outputs[0].token_ids == expected_tokens(PROMPT, 6)
    built.engine.close_sync()


def test_a_request_without_an_outbox_is_the_callers_fault() -> None:
    built = make_engine()
    with pytest.raises(AssertionError, match="outbox"):
        built.loop.submit(add_request("r"))
    assert last_of(built).status == "completed"
    built.engine.close_sync()


def test_a_request_that_breaks_the_scheduler_is_told_so() -> None:
    built = make_engine()
    built.loop._scheduler.add = None  # type: ignore[assignment,method-assign]
    output = last_of(built)
    assert output.status == "error"
    assert "engine loop failed" in str(output.error)
    built.loop.join(60.0)
    assert built.runner.is_closed
    with pytest.raises(EngineClosedError, match="stopped for good"):
        last_of(built)
    built.engine.close_sync()


def test_a_request_whose_choices_do_not_all_find_a_place_ends_as_rejected_and_others_go_on() -> None:
    built = make_engine(gate_open=False, max_num_seqs=1, max_waiting_requests=2)
    outputs: list[RequestOutput] = []
    first = threading.Thread(target=lambda: outputs.extend(built.engine.generate_sync(PROMPT, SHORT)))
    first.start()
    assert built.runner.waiting.wait(60.0)
    wide = built.engine.generate_sync([9, *PROMPT], SHORT.replace(n=4))
    threading.Timer(0.05, built.runner.gate.set).start()
    refused = list(wide)[-1]
    first.join(60.0)
    assert (refused.status, refused.finished) == ("rejected", True)
    assert isinstance(refused.error, QueueFullError)
    assert [choice.finish_reason for choice in refused.outputs][2:] == ["error", "error"]  # what was queued may end before its abort comes
    assert outputs[-1].outputs[0].token_ids == expected_tokens(PROMPT, 6)
    assert built.engine.front.drain(60.0)
    built.settle()
    stats = built.engine.stats()
    assert (stats.num_finished["rejected"], stats.num_finished["completed"], stats.num_active_blocks) == (1, 1, 0)
    built.engine.close_sync()


def test_every_request_of_an_engine_that_gives_up_is_counted_once() -> None:
    built = make_engine(max_num_seqs=1, gate_open=False)
    streams = [built.engine.generate_sync([i, *PROMPT], LONG) for i in range(5)]
    outputs: list[RequestOutput] = []
    threads = [threading.Thread(target=lambda stream=stream: outputs.append(list(stream)[-1])) for stream in streams]
    for thread in threads:
        thread.start()
    assert built.runner.waiting.wait(60.0)
    while built.engine.front.num_open < 5:
        pass  # they are on their way
    built.runner.submit_errors += [RuntimeError("device lost") for _ in range(3)]
    built.runner.gate.set()
    for thread in threads:
        thread.join(60.0)
    assert [output.status for output in outputs] == ["error"] * 5
    assert all("device lost" in str(output.error) for output in outputs)
    built.loop.join(60.0)
    assert built.engine.stats().num_finished["error"] == 5
    assert built.runner.is_closed
    built.engine.close_sync()


class _Activations:
    """Stands for device memory that a local variable of the runner holds."""


class _FailingRunner(GatedRunner):
    __slots__ = ("held",)

    def submit(self, plan: StepPlan) -> PendingStep:
        activations = _Activations()
        self.held = weakref.ref(activations)
        return super().submit(plan)


def test_the_error_that_a_caller_keeps_does_not_keep_device_memory() -> None:
    loop, gated = make_loop()
    runner = _FailingRunner(gated.inner, gated.gate)
    loop._runner = runner
    engine = AsyncEngine(loop=loop)
    runner.submit_errors.append(MemoryError("no room"))
    kept = list(engine.generate_sync(PROMPT, SHORT))[-1].error
    assert isinstance(kept, StepFailedError)
    assert isinstance(kept.__cause__, MemoryError)
    gc.collect()
    assert runner.held() is None
    engine.close_sync()


def test_a_forgotten_engine_is_closed_and_one_whose_stream_is_read_is_not() -> None:
    loop, runner = make_loop()
    stream = AsyncEngine(loop=loop).generate_sync(PROMPT, SHORT)
    gc.collect()
    assert list(stream)[-1].outputs[0].token_ids == expected_tokens(PROMPT, 6)
    assert not runner.is_closed
    del stream
    gc.collect()
    assert runner.is_closed


def test_an_engine_that_cannot_start_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: object) -> None:
        raise ConfigError("no tokenizer here")

    monkeypatch.setattr(pagedcore.async_engine, "load_text", fail)
    loop, runner = make_loop()
    with pytest.raises(ConfigError):
        AsyncEngine(loop=loop)
    assert runner.is_closed


def test_an_engine_whose_warm_up_fails_does_not_start() -> None:
    loop, runner = make_loop()
    runner.submit_errors.append(RuntimeError("no kernel for this device"))
    with pytest.raises(StepFailedError, match="no kernel for this device"):
        AsyncEngine(loop=loop)
    assert runner.is_closed


def test_a_warm_up_prompt_that_is_refused_is_told_and_counting_goes_on() -> None:
    built = make_engine(max_model_len=32)
    with pytest.raises(PromptTooLongError):
        built.engine.warm_up([list(range(40))])  # type: ignore[list-item]
    assert built.loop.is_recording
    assert last_of(built).status == "completed"
    assert built.engine.stats().num_finished["completed"] == 1
    built.engine.close_sync()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_the_engine_is_not_its_own() -> None:
    built = make_engine()
    child = os.fork()
    if child == 0:
        os._exit(_what_a_child_sees(built))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert last_of(built).status == "completed"
    built.engine.close_sync()


def _what_a_child_sees(built: Built) -> int:
    try:
        list(built.engine.generate_sync(PROMPT, SHORT))
    except EngineClosedError as error:
        if "forked" in str(error):
            built.engine.close_sync()
            return 0 if not built.runner.is_closed else 2
    return 1


class _LoggingRunner:
    """Notes when steps are submitted and when their results are asked for."""

    def __init__(self, inner: GatedRunner) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int]] = []

    def submit(self, plan: StepPlan) -> PendingStep:
        self.calls.append(("submit", plan.step_id))
        return _LoggedStep(self, plan.step_id, self.inner.submit(plan))

    def close(self) -> None:
        self.inner.close()


class _LoggedStep:
    def __init__(self, runner: _LoggingRunner, step_id: int, pending: PendingStep) -> None:
        self.runner, self.step_id, self.pending = runner, step_id, pending

    def result(self) -> StepResult:
        self.runner.calls.append(("result", self.step_id))
        return self.pending.result()


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_the_next_step_is_on_the_device_before_this_ones_result_is_waited_for(overlap: bool) -> None:
    loop, gated = make_loop(overlap=overlap)
    runner = _LoggingRunner(gated)
    loop._runner = runner
    engine = AsyncEngine(loop=loop)
    runner.calls.clear()
    list(engine.generate_sync(PROMPT, SHORT))
    first = runner.calls[0][1]
    turn = [("submit", first + 1), ("result", first)] if overlap else [("result", first), ("submit", first + 1)]
    assert runner.calls[1:3] == turn
    submitted = [step_id for kind, step_id in runner.calls if kind == "submit"]
    ahead = [runner.calls.index(("submit", n + 1)) < runner.calls.index(("result", n)) for n in submitted[:-1]]
    assert ahead == [overlap] * len(ahead)
    engine.close_sync()


@pytest.mark.parametrize(
    "make_prompt",
    [lambda ids: ids, lambda ids: {"prompt_token_ids": ids}, lambda ids: memoryview_like(ids)],
    ids=["list", "mapping", "array"],
)
def test_long_prompts_are_read_off_the_event_loop(make_prompt: Callable[[list[int]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_engine()
    seen: list[threading.Thread] = []
    tokenize = built.engine.front.tokenize

    def note(*args: Any) -> Any:
        seen.append(threading.current_thread())
        return tokenize(*args)

    monkeypatch.setattr(built.engine.front, "tokenize", note)

    async def main() -> None:
        for length in (3, INLINE_PROMPT_LENGTH + 1):
            async for _ in built.engine.generate(make_prompt([1] * length), SHORT):
                pass

    asyncio.run(main())
    assert [thread is threading.main_thread() for thread in seen] == [True, False]
    built.engine.close_sync()


def memoryview_like(ids: list[int]) -> Any:
    from array import array

    return array("i", ids)


def test_token_ids_come_as_arrays_too() -> None:
    numpy = pytest.importorskip("numpy")
    built = make_engine()
    for prompt in (numpy.array(PROMPT), [numpy.int64(token) for token in PROMPT], tuple(PROMPT), memoryview_like(PROMPT)):
        output = list(built.engine.generate_sync(prompt, SHORT))[-1]
        assert output.prompt_token_ids == PROMPT
        assert {type(token) for token in output.prompt_token_ids} == {int}
        assert output.outputs[0].token_ids == expected_tokens(PROMPT, 6)
    built.engine.close_sync()


def test_the_loop_keeps_nothing_of_requests_that_have_ended() -> None:
    built = make_engine()
    before = _sizes(built.loop, built)
    for _ in range(50):
        list(built.engine.generate_sync(PROMPT, SHORT.replace(n=2)))
        stream = built.engine.generate_sync(PROMPT, LONG)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    built.settle()
    assert _sizes(built.loop, built) == before
    built.engine.close_sync()


def _sizes(loop: EngineLoop, built: Built) -> dict[str, int]:
    state = loop._scheduler._state
    sized = {
        "outboxes": loop._outboxes,
        "in flight": loop._in_flight,
        "requests": state.requests,
        "waiting": state.waiting,
        "running": state.running,
        "updates": state.record.updates,
        "deferred": state.kv._deferred,
        "being computed": state.kv._being_computed,
        "streams": built.engine.front._streams,
        "ending": built.engine.front._ending,
        "open": loop._recorder._requests._open,
        "groups": loop._recorder._requests._groups,
        "lookups": loop._recorder._lookups.store._running,
    }
    return {name: len(value) for name, value in sized.items()}
