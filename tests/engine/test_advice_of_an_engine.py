"""Advice and traces through the public doors of an engine."""

from __future__ import annotations

from pathlib import Path

from pagedcore import SamplingParams
from pagedcore.advice.trace import read_trace
from support.engine_builder import Built, make_engine


def serve(built: Built, num_requests: int) -> None:
    for number in range(num_requests):
        prompt = [*range(32), number % 40]
        for output in built.engine.generate_sync(prompt, SamplingParams(max_tokens=2, ignore_eos=True)):
            assert output.error is None
    built.settle()


def test_an_engine_advises_on_what_it_served_and_not_on_its_warm_up() -> None:
    built = make_engine()
    serve(built, 20)
    advice = built.engine.advice()
    assert advice.num_lookups == 20
    assert advice.hit_rate == built.engine.stats().hit_rate("prefix") == 19 * 32 / (20 * 33)
    assert advice.sentences == ("The cache needs no change: it serves 92 % of a possible 92 %.",)
    assert {point.block_size for point in advice.curve} == {8, 16, 32, 64}
    built.engine.close_sync()


def test_a_trace_holds_what_was_served_while_it_was_recorded(tmp_path: Path) -> None:
    built = make_engine()
    serve(built, 1)
    built.engine.record_trace(tmp_path / "t.jsonl")
    serve(built, 2)
    built.engine.record_trace(None)
    assert len(list(read_trace(tmp_path / "t.jsonl"))) == 2
    built.engine.record_trace(tmp_path / "u.jsonl")
    serve(built, 3)
    built.engine.close_sync()
    requests = list(read_trace(tmp_path / "u.jsonl"))
    assert [request.prompt_token_ids[-1] for request in requests] == [0, 1, 2]
    assert all(request.num_output_tokens == 2 and request.end_s >= request.start_s >= request.arrival_s for request in requests)


def test_advice_can_be_asked_of_a_closed_engine() -> None:
    built = make_engine()
    serve(built, 2)
    built.engine.close_sync()
    assert built.engine.advice().num_lookups == 2
