"""An engine with a host tier, on the fake runner: what it serves, counts and tells, and that nothing is lost when things go wrong."""

from __future__ import annotations

import asyncio

import pytest

from pagedcore import engine_loop
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import Built, expected_tokens, make_engine

PROMPTS = [[index] * 20 for index in range(1, 7)]
"""Two full blocks of 8 tokens each before the last token."""


def serve(built: Built, prompt: list[int], count: int = 3) -> RequestOutput:
    return list(built.engine.generate_sync(prompt, SamplingParams(max_tokens=count, temperature=0.0)))[-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_second_round_is_served_from_host_memory_with_the_same_tokens(overlap: bool) -> None:
    built = make_engine(overlap=overlap, num_blocks=6, num_host_blocks=32, max_model_len=40)
    before, copied = built.engine.stats(), dict(built.runner.inner.num_copied)
    first, second = ([serve(built, prompt) for prompt in PROMPTS] for _ in range(2))
    first, second = list(first), list(second)
    for prompt, *outputs in zip(PROMPTS, first, second, strict=True):
        assert [output.outputs[0].token_ids for output in outputs] == [expected_tokens(prompt, 3)] * 2
    assert [output.cache.host_tokens for output in first if output.cache] == [0] * 6
    assert [output.cache.host_tokens for output in second if output.cache] == [16] * 6
    stats = built.engine.stats() - before
    assert stats.prefix_cache_hit_tokens_by_source == {"live": 0, "pool": 0, "host": 6 * 16}
    assert stats.hit_rate() == 6 * 16 / (12 * 20)
    assert stats.swapped_blocks == {
        direction: built.runner.inner.num_copied[direction] - copied.get(direction, 0) for direction in ("out", "in")
    }
    assert stats.swapped_blocks["in"] == 12
    built.settle()
    built.engine.close_sync()


def test_a_preempted_request_tells_when_its_blocks_went_and_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests that end with 5 blocks each, in a pool of 7."""
    built = make_engine(num_blocks=7, num_host_blocks=32, max_model_len=48, max_num_seqs=2)
    before = built.engine.stats()
    params = SamplingParams(max_tokens=32, temperature=0.0)

    monkeypatch.setattr(engine_loop, "MAX_GATHERING_S", 30.0)

    async def collect(prompt: list[int]) -> RequestOutput:
        return [output async for output in built.engine.generate(prompt, params)][-1]

    async def main() -> list[RequestOutput]:
        with built.loop.gathering():
            both = [asyncio.create_task(collect([token] * 8)) for token in (7, 8)]
            await asyncio.sleep(0)  # each runs until it has sent its request
            assert built.engine.front.num_open == 2
        return await asyncio.gather(*both)

    outputs = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == [expected_tokens([7] * 8, 32), expected_tokens([8] * 8, 32)]
    names = [event["name"] for record in built.engine.history.recent(2) for event in record["events"]]
    assert names.count("swapped_in") == names.count("resumed") == names.count("preempted") == 1
    assert names.index("preempted") < names.index("swapped_out") < names.index("resumed")
    assert (built.engine.stats() - before).recomputed_tokens == 0
    built.settle()
    built.engine.close_sync()


def test_a_failed_step_forgets_host_memory_and_the_engine_goes_on() -> None:
    built = make_engine(num_blocks=6, num_host_blocks=32, max_model_len=40)
    for prompt in PROMPTS:
        serve(built, prompt)
    next_step = built.loop.call(lambda: built.loop._scheduler._next_step_id).result()
    built.runner.inner.failing_steps = {next_step}
    assert serve(built, PROMPTS[0]).status == "error"
    output = serve(built, PROMPTS[1])
    assert output.cache is not None
    assert (output.cache.num_cached_tokens, output.outputs[0].token_ids) == (0, expected_tokens(PROMPTS[1], 3))
    built.settle()
    built.engine.close_sync()


def test_a_reset_forgets_host_memory() -> None:
    built = make_engine(num_blocks=6, num_host_blocks=32, max_model_len=40)
    for prompt in PROMPTS:
        serve(built, prompt)
    assert built.engine.reset_prefix_cache()
    output = serve(built, PROMPTS[0])
    assert output.cache is not None
    assert output.cache.num_cached_tokens == 0
    built.engine.close_sync()
