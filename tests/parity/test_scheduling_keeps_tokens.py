"""Real weights, real memory: whatever shares the batch, however it is cut, cached, preempted or aborted, the tokens are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pagedcore import LLM, AsyncEngine
from pagedcore.outputs import CompletionOutput, RequestOutput
from support.parity import (
    Request,
    assert_partition,
    assert_same_run,
    first_difference,
    mixed_requests,
    near_tie_gap,
    real_llm,
    run_alone,
    run_together,
    with_logprobs,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

REQUESTS = mixed_requests()


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    """Each request by itself, nothing cached."""
    with real_llm(enable_prefix_caching=False) as llm:
        return run_alone(llm, with_logprobs(REQUESTS))


def check(llm: LLM, alone: list[RequestOutput], outputs: list[RequestOutput]) -> None:
    assert_same_run(alone, outputs, [request.params for request in REQUESTS], near_tie_gap(llm.engine.plan))
    for output in outputs:
        assert_partition(output, llm.engine.plan.block_size)
    llm.check()


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"overlap": True}], ids=["cache", "no-cache", "overlap"])
def test_together_equals_alone(alone: list[RequestOutput], options: dict[str, Any]) -> None:
    with real_llm(**options) as llm:
        check(llm, alone, run_together(llm, REQUESTS))
        stats = llm.stats()
        assert stats.num_steps < 60  # one after another they need more than 200
        assert (stats.prefix_cache_hit_tokens > 0) is (options != {"enable_prefix_caching": False})


@pytest.mark.parametrize("max_num_batched_tokens", [16, 64])
def test_every_chunk_size_gives_the_same_tokens(alone: list[RequestOutput], max_num_batched_tokens: int) -> None:
    with real_llm(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16) as llm:
        check(llm, alone, run_together(llm, REQUESTS))
        assert llm.stats().num_steps > 600 // max_num_batched_tokens


@pytest.mark.parametrize("block_size", [8, 32, 64, 128, 256])
def test_every_block_size_gives_the_same_tokens(alone: list[RequestOutput], block_size: int) -> None:
    with real_llm(block_size=block_size, num_kv_blocks=8192 // block_size) as llm:
        outputs = run_together(llm, REQUESTS)
        check(llm, alone, outputs)
        shared = first_difference(outputs[0].prompt_token_ids, outputs[1].prompt_token_ids)
        assert shared is not None
        assert llm.stats().prefix_cache_hit_tokens >= shared - shared % block_size > 0


def test_the_second_time_everything_comes_from_the_cache_and_is_the_same(alone: list[RequestOutput]) -> None:
    with real_llm() as llm:
        first = run_together(llm, REQUESTS)
        before = llm.stats()
        second = run_together(llm, REQUESTS)
        check(llm, alone, second)
        eligible = sum(16 * ((len(output.prompt_token_ids) - 1) // 16) for output in first)
        assert (llm.stats() - before).prefix_cache_hit_tokens == eligible


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_resume_to_the_same_tokens(alone: list[RequestOutput], overlap: bool) -> None:
    with real_llm(block_size=8, num_kv_blocks=48, max_model_len=384, overlap=overlap) as llm:
        outputs = run_together(llm, REQUESTS)
        check(llm, alone, outputs)
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.recomputed_tokens > 0
        assert sum(output.num_preemptions for output in outputs) == stats.num_preemptions
        assert stats.num_active_blocks == 0


def test_float8_keys_give_the_same_tokens_but_for_near_ties() -> None:
    with real_llm(kv_cache_dtype="fp8", enable_prefix_caching=False) as llm:
        alone = run_alone(llm, with_logprobs(REQUESTS))
        again = run_alone(llm, with_logprobs(REQUESTS[:1]))[0]
        assert again.outputs[0].logprobs == alone[0].outputs[0].logprobs, "the same steps give the same"
    for options in ({"max_num_batched_tokens": 64}, {"block_size": 8, "num_kv_blocks": 48, "max_model_len": 384}):
        with real_llm(kv_cache_dtype="fp8", **options) as llm:
            check(llm, alone, run_together(llm, REQUESTS))


def test_few_rows_and_another_order_give_the_same_tokens(alone: list[RequestOutput]) -> None:
    with real_llm(max_num_seqs=3, scheduling_policy="priority") as llm:
        prompts, params = [request.prompt for request in REQUESTS], [request.params for request in REQUESTS]
        check(llm, alone, llm.generate(prompts, params, priority=[-index for index in range(len(REQUESTS))]))


def test_logprobs_are_the_same_in_every_batch(alone: list[RequestOutput]) -> None:
    asked = [Request(request.prompt, request.params.replace(logprobs=5)) for request in REQUESTS]
    with real_llm(max_num_batched_tokens=64) as llm:
        outputs = run_together(llm, asked)
    num_compared = 0
    for one, other in zip(alone, outputs, strict=True):
        for choice, same in zip(one.outputs, other.outputs, strict=True):
            num_compared += assert_same_logprobs(choice, same)
    assert num_compared > 100


def assert_same_logprobs(choice: CompletionOutput, other: CompletionOutput) -> int:
    """Of the tokens before a difference; returns how many those are."""
    assert choice.logprobs is not None
    assert other.logprobs is not None
    num_equal = first_difference(choice.token_ids, other.token_ids)
    steps = list(zip(other.token_ids, choice.logprobs, other.logprobs, strict=True))[:num_equal]
    for token, expected, found in steps:
        assert 5 <= len(found) <= 6
        assert {entry.rank for entry in found.values()} >= {1, 2, 3, 4, 5}
        assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-3)
        for candidate in found.keys() & expected.keys():
            assert found[candidate].logprob == pytest.approx(expected[candidate].logprob, abs=1e-3)
    assert other.cumulative_logprob == pytest.approx(
        sum(entries[t].logprob for t, entries in zip(other.token_ids, other.logprobs, strict=True))
    )
    return len(steps)


def test_aborted_requests_disturb_nobody_and_come_out_the_same_when_sent_again(alone: list[RequestOutput]) -> None:
    victims = range(0, len(REQUESTS), 2)

    async def last_output(engine: AsyncEngine, request: Request) -> RequestOutput:
        *_, last = [output async for output in engine.generate(request.prompt, request.params)]
        return last

    async def leave_early(engine: AsyncEngine, request: Request) -> None:
        stream = engine.generate(request.prompt, request.params)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def main(engine: AsyncEngine) -> list[RequestOutput]:
        others = [index for index in range(len(REQUESTS)) if index not in victims]
        kept = [asyncio.create_task(last_output(engine, REQUESTS[index])) for index in others]
        await asyncio.gather(*(leave_early(engine, REQUESTS[index]) for index in victims))
        again = await asyncio.gather(*(last_output(engine, REQUESTS[index]) for index in victims))
        outputs = dict(zip(others, await asyncio.gather(*kept), strict=True)) | dict(zip(victims, again, strict=True))
        return [outputs[index] for index in range(len(REQUESTS))]

    with real_llm(max_num_batched_tokens=128) as llm:
        outputs = asyncio.run(main(llm.engine))
        check(llm, alone, outputs)
        assert llm.stats().num_finished["aborted"] == len(victims)
        assert llm.stats().num_active_blocks == 0


def test_choice_zero_of_n_is_the_request_alone_and_the_others_differ(alone: list[RequestOutput]) -> None:
    index = next(i for i, request in enumerate(REQUESTS) if request.params.n == 3)
    with real_llm() as llm:
        single = llm.generate(REQUESTS[index].prompt, REQUESTS[index].params.replace(n=1))[0]
    assert_same_run([_only_first_choice(alone[index])], [single], [REQUESTS[index].params], near_tie_gap(llm.engine.plan))
    assert len({tuple(choice.token_ids) for choice in alone[index].outputs}) == 3


def _only_first_choice(output: RequestOutput) -> RequestOutput:
    choices: Sequence[CompletionOutput] = output.outputs[:1]
    return RequestOutput(output.request_id, output.prompt, output.prompt_token_ids, list(choices), finished=True)
