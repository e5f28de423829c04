"""The engine thread: requests end exactly once, failures stay with their step, closing loses nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pagedcore import engine_loop
from pagedcore.client import RequestContext
from pagedcore.core.step import PendingStep, StepPlan
from pagedcore.errors import EngineClosedError, EngineError, InvalidRequestError, PromptTooLongError, QueueFullError, StepFailedError
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import QueueWaker
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import Built, expected_tokens, make_engine
from support.fake_runner import FakeRunner

PROMPT = list(range(1, 21))


def params(count: int = 6, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **changes)  # type: ignore[arg-type]


def last_of(built: Built, prompt: list[int], count: int = 6) -> RequestOutput:
    return list(built.engine.generate_sync(prompt, params(count)))[-1]


async def collect(built: Built, prompt: list[int], request_id: str | None = None, count: int = 6) -> list[RequestOutput]:
    return [output async for output in built.engine.generate(prompt, params(count), request_id)]


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_carry_every_token_once_and_cumulate(overlap: bool) -> None:
    built = make_engine(overlap=overlap)
    outputs = list(built.engine.generate_sync(PROMPT, params(9)))
    assert outputs[-1].outputs[0].token_ids == expected_tokens(PROMPT, 9)
    assert [t for o in outputs for t in o.outputs[0].new_token_ids] == outputs[-1].outputs[0].token_ids
    assert outputs[-1].finished
    assert outputs[-1].status == "completed"
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert not any(o.finished for o in outputs[:-1])
    built.engine.check()
    built.engine.close_sync()


@pytest.mark.parametrize("overlap", [False, True])
def test_five_hundred_streams_on_one_loop_lose_nothing(overlap: bool) -> None:
    built = make_engine(overlap=overlap, num_blocks=400, max_num_seqs=64, max_num_batched_tokens=128)

    async def main() -> None:
        prompts = [[1 + i % 40, 1 + i // 40, *range(1, 2 + i % 13)] for i in range(500)]
        streams = await asyncio.gather(*(collect(built, prompt) for prompt in prompts))
        for prompt, outputs in zip(prompts, streams, strict=True):
            assert [t for o in outputs for t in o.outputs[0].new_token_ids] == expected_tokens(prompt, 6)

    asyncio.run(main())
    assert built.engine.stats().num_finished["completed"] == 500
    assert built.engine.front.num_open == 0
    built.engine.close_sync()


def test_an_engine_built_without_a_loop_serves_several_loops_and_threads_at_once() -> None:
    built = make_engine()
    results: dict[int, list[int]] = {}

    def serve(number: int) -> None:
        outputs = asyncio.run(collect(built, [number, *PROMPT]))
        results[number] = outputs[-1].outputs[0].token_ids

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: expected_tokens([number, *PROMPT], 6) for number in range(8)}
    built.engine.close_sync()


def test_leaving_a_stream_early_aborts_it_and_frees_its_blocks() -> None:
    built = make_engine(max_model_len=20_100, num_blocks=2600)

    async def main() -> None:
        stream = built.engine.generate(PROMPT, params(20_000))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())
    built.settle()
    stats = built.engine.stats()
    assert stats.num_finished["aborted"] == 1
    assert stats.num_active_blocks == 0
    assert built.engine.front.num_open == 0
    built.engine.close_sync()


def test_abort_by_id_ends_the_stream_with_a_last_output() -> None:
    built = make_engine(gate_open=False)

    async def main() -> list[RequestOutput]:
        task = asyncio.create_task(collect(built, PROMPT, "victim", 200))
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        await built.engine.abort("victim")
        built.runner.gate.set()
        return await task

    outputs = asyncio.run(main())
    assert outputs[-1].finished
    assert outputs[-1].status == "aborted"
    assert outputs[-1].outputs[0].finish_reason == "abort"
    built.engine.close_sync()


def test_a_request_that_can_never_fit_is_an_output_with_status_rejected() -> None:
    built = make_engine(max_model_len=32)
    outputs = asyncio.run(collect(built, PROMPT, count=100))
    assert [o.status for o in outputs] == ["rejected"]
    assert isinstance(outputs[0].error, PromptTooLongError)
    assert outputs[0].finished
    assert built.engine.stats().num_finished["rejected"] == 1
    built.engine.close_sync()


def test_a_full_queue_rejects_with_the_time_to_come_back() -> None:
    built = make_engine(gate_open=False, max_num_seqs=1, max_waiting_requests=1)

    async def main() -> list[list[RequestOutput]]:
        tasks = [asyncio.create_task(collect(built, [i, *PROMPT])) for i in range(1)]
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        tasks += [asyncio.create_task(collect(built, [i, *PROMPT])) for i in range(1, 4)]
        await asyncio.sleep(0)
        built.runner.gate.set()
        return await asyncio.gather(*tasks)

    streams = asyncio.run(main())
    rejected = [outputs[-1] for outputs in streams if outputs[-1].status == "rejected"]
    assert len(rejected) == 2
    assert all(isinstance(o.error, QueueFullError) and o.error.retry_after_s > 0 for o in rejected)
    built.engine.close_sync()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_own_requests_and_the_engine_goes_on(overlap: bool) -> None:
    built = make_engine(overlap=overlap)
    built.runner.inner.failing_steps.add(5)
    output = last_of(built, PROMPT, 20)
    assert output.status == "error"
    assert isinstance(output.error, StepFailedError)
    assert "fails on purpose" in str(output.error)
    assert last_of(built, PROMPT).outputs[0].token_ids == expected_tokens(PROMPT, 6)
    assert built.engine.stats().num_finished["error"] == 1
    built.engine.check()
    built.engine.close_sync()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_cannot_be_submitted_ends_its_own_requests_only(overlap: bool) -> None:
    built = make_engine(overlap=overlap)
    built.runner.submit_errors.append(MemoryError("no room"))
    assert isinstance(last_of(built, PROMPT).error, StepFailedError)
    assert last_of(built, PROMPT).outputs[0].token_ids == expected_tokens(PROMPT, 6)
    built.engine.close_sync()


def test_a_device_that_keeps_failing_stops_the_engine_and_says_so() -> None:
    built = make_engine()
    built.runner.submit_errors += [RuntimeError("device lost") for _ in range(3)]
    outputs = [last_of(built, [i, *PROMPT]) for i in range(3)]
    assert all(output.status == "error" and "device lost" in str(output.error) for output in outputs)
    built.loop.join(60.0)
    assert not asyncio.run(built.engine.is_alive())
    assert not asyncio.run(built.engine.is_ready())
    with pytest.raises(EngineClosedError, match="device lost"):
        last_of(built, PROMPT)
    built.engine.close_sync()
    assert built.runner.is_closed


def test_closing_ends_what_runs_as_aborted_and_refuses_the_rest() -> None:
    built = make_engine(gate_open=False, max_model_len=20_100, num_blocks=2600)

    async def main() -> list[RequestOutput]:
        task = asyncio.create_task(collect(built, PROMPT, count=20_000))
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        closing = asyncio.create_task(built.engine.close())
        built.runner.gate.set()
        await closing
        return await task

    outputs = asyncio.run(main())
    assert outputs[-1].finished
    assert outputs[-1].status == "aborted"
    assert built.runner.is_closed
    with pytest.raises(EngineClosedError):
        last_of(built, PROMPT)
    built.engine.close_sync()


def test_draining_finishes_open_streams_and_takes_no_new_ones() -> None:
    built = make_engine(gate_open=False)

    async def main() -> None:
        task = asyncio.create_task(collect(built, PROMPT))
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        draining = asyncio.create_task(built.engine.drain(60.0))
        await asyncio.sleep(0)  # the task has begun
        assert not await built.engine.is_ready()
        with pytest.raises(EngineClosedError, match="draining"):
            await collect(built, PROMPT)
        built.runner.gate.set()
        assert await draining
        assert (await task)[-1].outputs[0].token_ids == expected_tokens(PROMPT, 6)

    asyncio.run(main())
    built.engine.close_sync()


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    built = make_engine(gate_open=False)

    async def main() -> None:
        task = asyncio.create_task(collect(built, PROMPT, "same"))
        await asyncio.to_thread(built.runner.waiting.wait, 60.0)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(built, PROMPT, "same")
        built.runner.gate.set()
        assert (await task)[-1].status == "completed"

    asyncio.run(main())
    built.engine.close_sync()


def test_the_choices_of_n_are_one_request_and_one_lookup() -> None:
    built = make_engine()
    output = list(built.engine.generate_sync(PROMPT, params(5, n=3)))[-1]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in output.outputs] == [expected_tokens(PROMPT, 5)] * 3
    stats = built.engine.stats()
    assert stats.prefix_cache_query_tokens == len(PROMPT)
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.generation_tokens == 15
    assert stats.num_finished["completed"] == 1
    built.engine.close_sync()


def test_warming_up_counts_as_no_traffic_and_leaves_its_prefix() -> None:
    built = make_engine()
    assert built.engine.stats().prompt_tokens == 0
    built.engine.warm_up([PROMPT])  # type: ignore[list-item]
    assert built.engine.stats().prefix_cache_query_tokens == 0
    output = last_of(built, PROMPT)
    assert output.num_cached_tokens == 16  # both full blocks before the last token
    assert built.engine.stats().prefix_cache_hit_tokens == 16
    built.engine.close_sync()


def test_warming_up_under_traffic_is_refused() -> None:
    built = make_engine()
    stream = built.engine.generate_sync(PROMPT, params(200))
    next(stream)
    with pytest.raises(EngineError, match="before the engine takes traffic"):
        built.engine.warm_up(["x"])
    stream.close()  # type: ignore[attr-defined]
    built.engine.close_sync()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 41], "Token id 41 is outside the vocabulary of 41"),
        ([-1], "Token id -1"),
        ([1.5], "text or token ids"),
        (7, "text or token ids"),
        ("text", "no tokenizer"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "either"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_name(prompt: object, message: str) -> None:
    built = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        list(built.engine.generate_sync(prompt, params()))  # type: ignore[arg-type]
    built.engine.close_sync()


def test_close_may_be_called_twice_and_from_several_threads() -> None:
    built = make_engine()
    threads = [threading.Thread(target=built.engine.close_sync) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    built.engine.close_sync()
    assert built.runner.is_closed


def test_requests_that_are_gathered_are_planned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_engine(max_num_seqs=8)
    plans: list[StepPlan] = []
    has_planned = threading.Event()
    submit = FakeRunner.submit

    def watch(self: FakeRunner, plan: StepPlan) -> PendingStep:
        plans.append(plan)
        has_planned.set()
        return submit(self, plan)

    monkeypatch.setattr(engine_loop, "MAX_GATHERING_S", 30.0)
    monkeypatch.setattr(FakeRunner, "submit", watch)
    prompts = [[1 + index, *range(1, 5)] for index in range(6)]
    waker = QueueWaker()
    with built.loop.gathering():
        for prompt in prompts:
            tokenized = built.engine.front.tokenize(prompt)
            built.engine.front.open(tokenized, params(2), None, context=RequestContext(), arrival_s=0.0, waker=waker)
        assert not has_planned.wait(0.05), "a step was planned before all had come"
    built.settle()
    assert len(plans[0].rows) == 6
    built.engine.close_sync()


def test_the_engine_does_not_wait_for_a_gathering_that_takes_long() -> None:
    built = make_engine()
    with built.loop.gathering():
        assert last_of(built, PROMPT).finished
    built.engine.close_sync()
