"""How requests end: stop ids, lengths, stop strings, aborts and failures, each exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagedcore.core.events import Finished, FirstToken, Preempted
from pagedcore.errors import EngineError, InvalidRequestError, StepFailedError
from support.core_builders import Driver
from support.fake_runner import next_token

PROMPT = [1, 2, 3, 4, 5]


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def finished_of(driver: Driver, request_id: str) -> Finished:
    (event,) = [event for event in driver.events_of(Finished) if event.request.request_id == request_id]
    return event


def test_the_stop_token_is_part_of_the_output_and_named() -> None:
    expected = alone(PROMPT, 3)
    driver = Driver.make()
    driver.add("r", PROMPT, max_tokens=9, stop_token_ids=frozenset({expected[2]}))
    driver.run()
    last = driver.last["r"]
    assert driver.tokens["r"] == expected
    assert (last.status, last.finish_reason, last.stop_reason) == ("completed", "stop", expected[2])


def test_end_of_sequence_has_no_stop_reason() -> None:
    eos = frozenset({alone(PROMPT, 1)[0]})
    driver = Driver.make()
    driver.add("r", PROMPT, stop_token_ids=eos, eos_token_ids=eos)
    driver.run()
    assert (driver.last["r"].finish_reason, driver.last["r"].stop_reason) == ("stop", None)


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 9), (2, 9)])
def test_a_stop_id_means_nothing_before_min_tokens(min_tokens: int, num_tokens: int) -> None:
    expected = alone(PROMPT, 9)
    assert expected[0] not in expected[1:]
    driver = Driver.make()
    driver.add("r", PROMPT, max_tokens=9, min_tokens=min_tokens, stop_token_ids=frozenset({expected[0]}))
    driver.run()
    assert driver.tokens["r"] == expected[:num_tokens]


@pytest.mark.parametrize("num_in_flight_steps", [1, 2, 3])
@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (3, 3), (None, 59)])
def test_output_ends_at_max_tokens_or_max_model_len(max_tokens: int | None, expected: int, num_in_flight_steps: int) -> None:
    driver = Driver.make(num_in_flight_steps=num_in_flight_steps)
    driver.add("r", PROMPT, max_tokens=max_tokens)
    driver.run()
    assert driver.tokens["r"] == alone(PROMPT, expected)
    assert driver.last["r"].finish_reason == "length"
    # nothing is sampled past the known end, also with steps ahead
    assert finished_of(driver, "r").num_discarded_tokens == 0
    assert len(driver.runner.computed_positions["r"]) == 5 + expected - 1


def test_finish_keeps_num_tokens_and_counts_the_rest_as_discarded() -> None:
    driver = Driver.make(num_in_flight_steps=2)
    driver.add("r", PROMPT, max_tokens=20)
    for _ in range(5):
        driver.turn()
    num_tokens = len(driver.tokens["r"])
    driver.scheduler.finish("r", 2, "END", driver.now_s)
    driver.take()
    last, event = driver.last["r"], finished_of(driver, "r")
    assert (last.status, last.finish_reason, last.stop_reason) == ("completed", "stop", "END")
    assert (event.num_output_tokens, event.num_discarded_tokens) == (2, num_tokens - 2 + 1)
    driver.run()
    assert len(driver.tokens["r"]) == num_tokens


def test_a_token_in_flight_when_its_request_stops_is_discarded() -> None:
    expected = alone(PROMPT, 3)
    driver = Driver.make(num_in_flight_steps=2)
    driver.add("r", PROMPT, max_tokens=20, stop_token_ids=frozenset({expected[2]}))
    driver.run()
    assert driver.tokens["r"] == expected
    assert finished_of(driver, "r").num_discarded_tokens == 1


def _waiting(driver: Driver) -> None:
    driver.add("r", PROMPT, max_tokens=9)


def _prefilling(driver: Driver) -> None:
    driver.add("r", range(30), max_tokens=9)
    driver.turn()
    assert not driver.tokens["r"]


def _decoding(driver: Driver) -> None:
    driver.add("r", PROMPT, max_tokens=9)
    for _ in range(4):
        driver.turn()
    assert driver.tokens["r"]


def _in_flight(driver: Driver) -> None:
    driver.add("r", PROMPT, max_tokens=9)
    driver.schedule()


def _preempted(driver: Driver) -> None:
    driver.add("first", [7] * 4, max_tokens=33)
    driver.add("r", [8] * 4, max_tokens=20)
    while not driver.events_of(Preempted):
        driver.turn()
    assert driver.events_of(Preempted)[0].request_id == "r"


STATES = (_waiting, _prefilling, _decoding, _in_flight, _preempted)


@pytest.mark.parametrize("num_in_flight_steps", [1, 2])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__[1:])
def test_abort_in_every_state_frees_exactly_once(reach: Callable[[Driver], None], num_in_flight_steps: int) -> None:
    driver = Driver.make(num_blocks=10, max_num_batched_tokens=8, max_model_len=40, num_in_flight_steps=num_in_flight_steps)
    reach(driver)
    for _ in range(2):
        driver.scheduler.abort("r", driver.now_s)
        driver.take()
    assert (driver.last["r"].status, driver.last["r"].finish_reason) == ("aborted", "abort")
    assert finished_of(driver, "r").status == "aborted"
    report = driver.last["r"].cache
    assert report is not None
    parts = report.live_tokens + report.pool_tokens + report.computed_tokens + report.abandoned_tokens
    assert parts == report.num_prompt_tokens == finished_of(driver, "r").request.prompt_token_ids.__len__()
    driver.run()
    counts = driver.counts()
    assert (counts.num_active_blocks, counts.num_running, counts.num_waiting) == (0, 0, 0)
    driver.add("r", PROMPT, max_tokens=2)  # the id is free again
    del driver.last["r"], driver.tokens["r"]
    driver.run()
    assert driver.tokens["r"] == alone(PROMPT, 2)


def test_abort_and_finish_after_the_end_or_of_unknown_ids_do_nothing() -> None:
    driver = Driver.make()
    driver.add("r", PROMPT, max_tokens=1)
    driver.run()
    driver.scheduler.abort("r", 9.0)
    driver.scheduler.finish("r", 1, None, 9.0)
    driver.scheduler.abort("never seen", 9.0)
    assert driver.scheduler.take_updates() == []
    assert driver.scheduler.take_events().events == []


def test_blocks_of_an_aborted_request_in_flight_wait_for_its_step() -> None:
    driver = Driver.make(num_blocks=4, max_model_len=16, num_in_flight_steps=2, enable_prefix_caching=False)
    driver.add("a", range(15), max_tokens=1)
    driver.schedule()
    driver.scheduler.abort("a", 1.0)
    driver.take()
    assert driver.counts().num_active_blocks == 4
    driver.add("b", [1], max_tokens=1)
    assert driver.schedule() is None
    driver.commit()
    assert driver.counts().num_free_blocks == 4
    assert driver.schedule() is not None


def test_a_masked_row_ends_its_request_as_invalid_and_others_go_on() -> None:
    driver = Driver.make()
    driver.runner.row_errors = {"bad": "every token is masked", "nan": "the logits are NaN"}
    for name in ("bad", "nan", "good"):
        driver.add(name, PROMPT, max_tokens=3)
    driver.run()
    assert isinstance(driver.last["bad"].error, InvalidRequestError)
    assert isinstance(driver.last["nan"].error, EngineError)
    assert (driver.last["bad"].status, driver.last["bad"].finish_reason) == ("error", "error")
    assert driver.tokens["bad"] == []
    assert driver.tokens["good"] == alone(PROMPT, 3)


def test_a_failed_step_ends_its_requests_and_only_those() -> None:
    driver = Driver.make()
    driver.runner.failing_steps = {0}
    driver.add("lost", PROMPT)
    driver.turn()
    driver.add("well", PROMPT, max_tokens=3)
    driver.run()
    assert isinstance(driver.last["lost"].error, StepFailedError)
    assert (driver.last["lost"].status, finished_of(driver, "lost").status) == ("error", "error")
    assert driver.tokens["well"] == alone(PROMPT, 3)


def test_with_overlap_requests_that_share_blocks_of_a_failed_step_end_with_it() -> None:
    prompt = list(range(9))
    driver = Driver.make(num_in_flight_steps=2)
    driver.runner.failing_steps = {0}
    driver.add("writer", prompt, max_tokens=4)
    driver.schedule()
    driver.add("reader", prompt, max_tokens=4)
    driver.add("other", PROMPT, max_tokens=4)
    driver.schedule()
    driver.commit()
    assert set(driver.last) == {"writer", "reader"}
    driver.add("later", prompt, max_tokens=4)
    driver.run()
    assert driver.tokens["other"] == alone(PROMPT, 4)
    assert driver.tokens["later"] == alone(prompt, 4)


def test_blocks_computed_on_top_of_a_failed_step_are_forgotten_even_if_their_request_was_aborted() -> None:
    driver = Driver.make(num_in_flight_steps=2)
    driver.runner.failing_steps = {0}
    driver.add("writer", range(9), max_tokens=4)
    driver.schedule()
    driver.add("reader", [*range(8), 50, 51, 52, 53, 54], max_tokens=4)  # its third block is computed from the writer's two
    driver.schedule()
    driver.scheduler.abort("reader", driver.now_s)
    driver.commit()
    driver.add("again", range(9), max_tokens=4)
    driver.run()
    driver.add("later", [*range(8), 50, 51, 52, 53, 54], max_tokens=4)
    driver.run()
    assert driver.tokens["later"] == alone([*range(8), 50, 51, 52, 53, 54], 4)


def test_first_token_brings_cache_report_and_prompt_logprobs_and_the_last_update_timings() -> None:
    driver = Driver.make(max_num_batched_tokens=2)
    driver.add("r", PROMPT, max_tokens=2, prompt_logprobs=0, logprobs=0)
    driver.run()
    first, last = driver.first["r"], driver.last["r"]
    assert first.cache is not None
    assert (first.cache.computed_tokens, first.cache.abandoned_tokens) == (5, 0)
    assert first.prompt_logprobs is not None
    assert [list(entry or ()) for entry in first.prompt_logprobs] == [[], [2], [3], [4], [5]]
    assert first.new_logprobs is not None
    assert list(first.new_logprobs[0]) == driver.tokens["r"][:1]
    assert last.prompt_logprobs is None
    assert last.timings is not None
    # chunks of 2, 2 and 1 tokens in turns 1 to 3
    assert (last.timings.arrival_s, last.timings.admitted_s, last.timings.first_token_s, last.timings.finished_s) == (0.0, 1.0, 3.0, 4.0)
    assert [event.now_s for event in driver.events_of(FirstToken)] == [3.0]


def test_a_request_of_300_tokens_that_shares_nothing_holds_19_blocks_of_16() -> None:
    driver = Driver.make(block_size=16, num_blocks=32, max_model_len=512, max_num_batched_tokens=512)
    driver.add("r", range(290), max_tokens=10)
    driver.run()
    event = finished_of(driver, "r")
    assert (event.num_held_blocks, event.num_new_blocks) == (19, 19)


def test_step_events_count_tokens_gaps_and_blocks() -> None:
    driver = Driver.make()
    driver.add("a", PROMPT, max_tokens=3)
    driver.add("b", [9], max_tokens=3)
    driver.turn()
    step = driver.steps[-1]
    assert (step.step_id, step.num_tokens, step.num_sequences, step.num_prefill_tokens, step.num_generated_tokens) == (0, 6, 2, 6, 2)
    assert (step.inter_token_gaps_s, step.num_running, step.num_waiting, step.num_live_tokens) == ([], 2, 0, 6)
    driver.turn()
    step = driver.steps[-1]
    assert (step.step_id, step.num_tokens, step.num_prefill_tokens, step.inter_token_gaps_s) == (1, 2, 0, [1.0, 1.0])
    assert (step.num_active_blocks, step.num_cached_blocks, step.num_free_blocks, step.num_live_tokens) == (3, 0, 13, 8)


def test_a_slot_that_several_requests_share_is_live_once() -> None:
    driver = Driver.make()
    stem = list(range(8))
    for name, own in (("a", 20), ("b", 21), ("c", 22)):
        driver.add(name, [*stem, own], max_tokens=4)
        driver.turn()
    step = driver.steps[-1]
    # blocks of 4: two of the stem, each in three tables, and one each of their own with 3, 2 and 1 tokens
    assert (step.num_running, step.num_active_blocks, step.num_live_tokens) == (3, 2 + 3, 8 + 3 + 2 + 1)
    driver.run()
    assert driver.steps[-1].num_live_tokens == 0
