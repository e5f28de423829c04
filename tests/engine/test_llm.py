"""`LLM`: the forms people type, on the fake runner."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

import pagedcore.async_engine
from pagedcore import LLM
from pagedcore.config import EngineConfig
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import EngineClosedError, InvalidRequestError, PoolTooSmallError, PromptTooLongError, UnknownOptionError
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import GatedRunner, expected_tokens, make_loop

A, B = list(range(1, 12)), list(range(5, 30))
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[GatedRunner]:
    """The fake runner of each LLM made in this test."""
    made: list[GatedRunner] = []

    def build(config: EngineConfig) -> EngineLoop:
        loop, runner = make_loop(num_blocks=config.num_kv_blocks or 256, max_model_len=64, scheduling_policy=config.scheduling_policy)
        made.append(runner)
        return loop

    monkeypatch.setattr(pagedcore.async_engine, "build_engine", build)
    return made


@pytest.mark.parametrize("make", [lambda: LLM("m"), lambda: LLM(model="m", block_size=16, max_num_seqs=256, kv_cache_dtype="auto")])
def test_the_constructor_forms_people_type(runners: list[GatedRunner], make: Callable[[], LLM]) -> None:
    with make() as llm:
        assert llm.generate(A, GREEDY)[0].outputs[0].token_ids == expected_tokens(A, 4)
    assert runners[0].is_closed


@pytest.mark.parametrize(
    ("prompts", "count"),
    [(A, 1), ([A, B], 2), ({"prompt_token_ids": A}, 1), ([{"prompt_token_ids": A}, B], 2), ([], 0)],
)
def test_prompts_come_back_in_order_in_every_form(runners: list[GatedRunner], prompts: object, count: int) -> None:
    with LLM() as llm:
        outputs = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert [o.outputs[0].token_ids for o in outputs] == [expected_tokens(p, 4) for p in (A, B)[:count]]
        assert all(o.finished and o.status == "completed" for o in outputs)


def test_parameters_and_contexts_may_be_one_a_prompt(runners: list[GatedRunner]) -> None:
    with LLM(scheduling_policy="priority") as llm:
        params = [GREEDY, GREEDY.replace(max_tokens=7)]
        outputs = llm.generate([B, B], params, cache_salt=["a", "b"], priority=[1, 0])
        assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 7]
        assert [o.num_cached_tokens for o in outputs] == [0, 0]  # different salts share nothing
        assert llm.generate([B], GREEDY, cache_salt="a")[0].num_cached_tokens == 24


def test_sampling_params_is_another_name_of_params(runners: list[GatedRunner]) -> None:
    with LLM() as llm:
        assert llm.generate(A, sampling_params=GREEDY)[0].outputs[0].token_ids == expected_tokens(A, 4)
        with pytest.raises(InvalidRequestError, match="give one of them"):
            llm.generate(A, GREEDY, sampling_params=GREEDY)


def test_a_wrong_number_of_parameters_is_refused(runners: list[GatedRunner]) -> None:
    with LLM() as llm, pytest.raises(InvalidRequestError, match="params has 1 entries for 2 prompts"):
        llm.generate([A, B], [GREEDY])


def test_a_request_that_can_never_fit_raises_before_anything_runs(runners: list[GatedRunner]) -> None:
    with LLM() as llm:
        with pytest.raises(PromptTooLongError, match="64"):
            llm.generate([A, B], [GREEDY, GREEDY.replace(max_tokens=60)])
        assert llm.stats().prompt_tokens == 0
    with LLM(num_kv_blocks=2) as small, pytest.raises(PoolTooSmallError, match="num_kv_blocks"):
        small.generate([B], GREEDY)


def test_a_failed_step_raises_its_error_and_the_next_call_works(runners: list[GatedRunner]) -> None:
    with LLM() as llm:
        runners[0].inner.failing_steps.add(3)
        with pytest.raises(Exception, match="fails on purpose"):
            llm.generate([A, B], GREEDY)
        assert llm.generate(A, GREEDY)[0].outputs[0].token_ids == expected_tokens(A, 4)
        llm.check()


def test_an_unknown_keyword_names_the_nearest_setting(runners: list[GatedRunner]) -> None:
    with pytest.raises(UnknownOptionError, match="'gpu_memory_utilization'"):
        LLM(gpu_memory_utilisation=0.5)
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(max_num_seq=4)


def test_stats_subtract_to_what_happened_between(runners: list[GatedRunner]) -> None:
    with LLM() as llm:
        llm.generate(B, GREEDY)
        before = llm.stats()
        llm.generate(B, GREEDY)
        between = llm.stats() - before
        assert between.prefix_cache_query_tokens == 25
        assert between.prefix_cache_hit_tokens == 24
        assert between.hit_rate("prefix") == pytest.approx(24 / 25)
        assert between.hit_rate("page") == 1.0
        assert llm.reset_prefix_cache()
        assert llm.generate(B, GREEDY)[0].num_cached_tokens == 0


def test_a_forgotten_llm_stops_its_engine(runners: list[GatedRunner]) -> None:
    llm = LLM()
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert runners[0].is_closed


def test_a_closed_llm_refuses_work(runners: list[GatedRunner]) -> None:
    llm = LLM()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate(A, GREEDY)


def test_two_engines_live_side_by_side(runners: list[GatedRunner]) -> None:
    with LLM() as one, LLM() as other:
        assert one.generate(A, GREEDY)[0].outputs[0].token_ids == other.generate(A, GREEDY)[0].outputs[0].token_ids
        assert one.stats().prompt_tokens == other.stats().prompt_tokens == len(A)
