"""The model runner on a CPU: scheduling decisions never change tokens."""

from __future__ import annotations

import pytest
import torch

from pagedcore.core.step import StepPlan
from pagedcore.sampling_params import SamplingParams
from support import runner_checks
from support.runner_driver import GREEDY, Driver, generate_alone, make_runner, prompts
from support.tiny_model import TinyModel


def test_together_equals_alone() -> None:
    runner_checks.check_together_equals_alone("cpu")


@pytest.mark.parametrize("chunk", [1, 7, 8, 32])
def test_chunked_prefill_equals_whole(chunk: int) -> None:
    runner_checks.check_chunks_equal_whole("cpu", chunk)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_size_is_irrelevant(block_size: int) -> None:
    runner_checks.check_block_size_is_irrelevant("cpu", block_size)


def test_resume_after_preemption_equals_uninterrupted() -> None:
    runner_checks.check_resume_equals_uninterrupted("cpu")


def test_submit_ahead_equals_step_by_step() -> None:
    runner_checks.check_submit_ahead_equals_step_by_step("cpu")


def test_rows_that_share_a_prefix_equal_alone() -> None:
    runner_checks.check_rows_that_share_a_prefix_equal_alone("cpu")


def test_passes_of_one_step_keep_their_logits() -> None:
    runner_checks.check_passes_keep_their_logits("cpu")


def test_poisoned_memory_never_leaks() -> None:
    runner_checks.check_poisoned_memory_never_leaks("cpu")


def test_prompt_logprobs_in_chunks_equal_one_token_at_a_time() -> None:
    runner_checks.check_prompt_logprobs("cpu")


def test_a_row_used_again_keeps_nothing_of_its_last_owner() -> None:
    model = TinyModel()
    long, short = prompts(100, 4)
    driver = Driver(make_runner(model))
    first = driver.add(0, long, SamplingParams(seed=1, logit_bias={7: 100.0}))
    assert driver.run([first], 5) == [[7] * 5]
    driver.release(first)
    assert driver.run([driver.add(0, short)], 20) == [generate_alone(model, short, 20)]


def test_a_row_reads_blocks_that_another_row_of_the_step_fills() -> None:
    model = TinyModel()
    stem, tail = prompts(32, 6)
    driver = Driver(make_runner(model))
    owner = driver.add(0, stem + tail)
    sharer = driver.add(1, stem + tail[:3])
    sharer.blocks[:4] = owner.blocks[:4]
    driver._admitted[1] = sharer.admitted()
    sharer.num_computed = 32
    driver.step([(owner, 38), (sharer, 3)])
    assert driver.run([owner, sharer], 9) == [generate_alone(model, stem + tail, 9), generate_alone(model, stem + tail[:3], 9)]


def test_sliding_window_model_runs_in_chunks() -> None:
    model = TinyModel(sliding_window=10)
    (prompt,) = prompts(50)
    driver = Driver(make_runner(model))
    assert driver.run([driver.add(0, prompt)], 20, chunk=9) == [generate_alone(model, prompt, 20)]


def test_logprobs_hold_the_token_and_its_alternatives_by_rank() -> None:
    model = TinyModel()
    (prompt,) = prompts(12)
    driver = Driver(make_runner(model))
    asked = driver.add(3, prompt, GREEDY.replace(logprobs=2, logit_bias={5: 100.0}))
    quiet = driver.add(1, prompt)
    result = driver.step([(asked, 12), (quiet, 12)])
    assert set(result.logprobs) == {3}
    entries = result.logprobs[3]
    assert asked.output == [5] and next(iter(entries)) == 5
    assert entries[quiet.output[0]].rank == 1, "log probabilities are of the distribution before logit_bias"
    assert entries[5].logprob <= entries[quiet.output[0]].logprob <= 0.0


def test_a_plan_that_only_releases_rows_has_an_empty_result() -> None:
    driver = Driver(make_runner(TinyModel()))
    sequence = driver.add(0, [1, 2, 3])
    driver.step([(sequence, 3)])
    driver.release(sequence)
    result = driver.step([])
    assert result.sampled_token_ids == [] and result.row_errors == {}


def test_a_failing_step_raises_from_its_result_and_not_from_submit() -> None:
    model = TinyModel()
    runner = make_runner(model)
    driver = Driver(runner)
    sequence = driver.add(0, [1, 2, 10_000])
    pending = driver.submit([(sequence, 3)])
    with pytest.raises(IndexError):
        pending.result()


def test_close_drops_weights_and_cache() -> None:
    runner = make_runner(TinyModel())
    runner.close()
    with pytest.raises(AttributeError):
        runner.submit(StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[])).result()
    assert not any(isinstance(value, torch.Tensor) for value in vars(runner).values())
