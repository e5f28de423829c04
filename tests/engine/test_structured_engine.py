"""Outputs that follow a grammar, through the whole engine: beside others, over preemptions, with every other setting."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedcore.async_engine import AsyncEngine
from pagedcore.errors import InvalidRequestError
from pagedcore.grammar import grammars as grammars_module
from pagedcore.grammar.grammars import Grammars
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_outputs import StructuredOutputsParams
from support.engine_builder import make_engine
from support.grammar_engine import grammar_engine, run_all
from support.grammars import BACKEND, EOS, VOCAB_SIZE

RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "maximum": 999, "minimum": -999},
        "tag": {"enum": ["hello", "bad"]},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "tag", "ok"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
FREE = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)


def following(form: Any, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "structured_outputs": form, **changes})


def check_record(output: RequestOutput) -> None:
    for choice in output.outputs:
        assert choice.finish_reason == "stop"
        assert choice.token_ids[-1] == EOS
        record = json.loads(choice.text)
        assert list(record) == ["id", "tag", "ok"]
        assert (type(record["id"]), record["tag"] in ("hello", "bad"), type(record["ok"])) == (int, True, bool)
        assert -999 <= record["id"] <= 999


@pytest.mark.parametrize("overlap", [False, True])
def test_records_and_free_texts_share_steps_and_each_gets_what_it_gets_alone(tmp_path: Path, overlap: bool) -> None:
    requests = [(f"prompt {index}", following(COMPACT, seed=index) if index % 2 else FREE.replace(seed=index)) for index in range(12)]
    with grammar_engine(tmp_path, overlap=overlap) as engine:
        together = run_all(engine, requests)
        alone = [run_all(engine, [request])[0] for request in requests]
        engine.check()
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    for output in together[1::2]:
        check_record(output)


def test_overlap_changes_no_token(tmp_path: Path) -> None:
    requests = [(f"prompt {index}", following({"regex": "[a-z]{3,12}"} if index % 3 else None, seed=index)) for index in range(9)]
    runs = []
    for overlap in (False, True):
        with grammar_engine(tmp_path, overlap=overlap) as engine:
            runs.append([output.outputs[0].token_ids for output in run_all(engine, requests)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_output_goes_on_where_its_grammar_was(tmp_path: Path, overlap: bool) -> None:
    requests = [("p" * 20, following(COMPACT, seed=index, max_tokens=70)) for index in range(6)]
    with grammar_engine(tmp_path, num_blocks=12, overlap=overlap, max_model_len=96, enable_prefix_caching=False) as engine:
        outputs = run_all(engine, requests)
        alone = [run_all(engine, [request])[0] for request in requests]
    assert sum(output.num_preemptions for output in outputs) > 0, "the pool was large enough for all"
    for output, single in zip(outputs, alone, strict=True):
        check_record(output)
        assert output.outputs[0].token_ids == single.outputs[0].token_ids


def test_every_choice_of_a_request_follows_it_and_they_differ(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        (output,) = run_all(engine, [("a", following(COMPACT, n=5, seed=3))])
    check_record(output)
    assert len({choice.text for choice in output.outputs}) > 1


def test_a_seed_gives_the_same_output_again(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        first, second, other = (run_all(engine, [("a", following(COMPACT, seed=seed))])[0] for seed in (7, 7, 8))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids != other.outputs[0].token_ids


def test_greedy_top_k_top_p_and_penalties_choose_among_what_is_allowed(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.2},
        {"min_p": 0.5},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"logit_bias": {BACKEND.token_to_id("x"): 100.0}},
    ]
    with grammar_engine(tmp_path) as engine:
        outputs = run_all(engine, [("a", following({"choice": ["hello", "world"]}, seed=1, **fields)) for fields in settings])
    assert {output.outputs[0].text for output in outputs} <= {"hello", "world"}


def test_logprobs_are_those_of_the_model_and_not_of_the_mask(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        (output,) = run_all(engine, [("a", following({"choice": ["hello"]}, logprobs=3))])
        (free,) = run_all(engine, [("a", FREE.replace(logprobs=3, max_tokens=1, seed=0))])
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    first, expected = choice.logprobs[0], free.outputs[0].logprobs
    assert expected is not None
    likeliest = {token: entry.logprob for token, entry in expected[0].items() if entry.rank <= 3}
    assert {token: entry.logprob for token, entry in first.items() if entry.rank <= 3} == pytest.approx(likeliest, abs=1e-5)
    assert first[choice.token_ids[0]].logprob < 0.0


def test_max_tokens_cuts_the_output_and_a_stop_string_ends_it(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        cut, stopped = run_all(
            engine, [("a", following({"regex": "x{50}"}, max_tokens=9)), ("a", following({"regex": "x{5}stop[a-z]*"}, stop="stop"))]
        )
    assert (cut.outputs[0].finish_reason, cut.outputs[0].text) == ("length", "x" * 9)
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason, stopped.outputs[0].text) == ("stop", "stop", "xxxxx")


def test_min_tokens_holds_the_end_back_as_long_as_the_grammar_goes_on(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        long, impossible = run_all(
            engine,
            [("a", following({"regex": "x*"}, min_tokens=30, seed=1)), ("a", following({"choice": ["q"]}, min_tokens=5, seed=1))],
        )
    assert len(long.outputs[0].token_ids) >= 30
    assert isinstance(impossible.error, InvalidRequestError)
    assert "min_tokens" in str(impossible.error)


def test_an_output_that_streams_only_ever_shows_a_beginning_of_what_it_becomes(tmp_path: Path) -> None:
    with grammar_engine(tmp_path) as engine:
        texts = [output.outputs[0].text for output in engine.generate_sync("a", following(COMPACT, seed=4))]
    assert all(texts[-1].startswith(text) for text in texts)
    assert len(texts) > 3


@pytest.mark.parametrize("form", [{"json": {"type": "strin"}}, {"regex": "(a"}, {"grammar": "start: x y"}])
def test_what_cannot_be_followed_is_refused_before_the_engine_hears_of_it(tmp_path: Path, form: dict[str, Any]) -> None:
    with grammar_engine(tmp_path) as engine:
        sent: list[object] = []
        engine.front._send = sent.append  # type: ignore[assignment]
        with pytest.raises(InvalidRequestError, match="cannot be followed"):
            list(engine.generate_sync("a", following(form)))
        assert sent == []


@pytest.mark.asyncio
async def test_a_grammar_is_compiled_off_the_event_loop_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    compile_grammar = grammars_module.compile_grammar

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return compile_grammar(*arguments)

    monkeypatch.setattr(grammars_module, "compile_grammar", watched)
    with grammar_engine(tmp_path) as engine:
        results = [[o async for o in engine.generate("a", following(COMPACT, seed=seed))][-1] for seed in range(3)]
    for output in results:
        check_record(output)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert threads[0].name != "pagedcore-engine"


@pytest.mark.asyncio
async def test_other_requests_stream_while_a_grammar_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, began = threading.Event(), threading.Event()
    compile_grammar = grammars_module.compile_grammar

    def slow(*arguments: Any) -> Any:
        began.set()
        assert may_end.wait(60.0)
        return compile_grammar(*arguments)

    async def last_of(engine: AsyncEngine, params: SamplingParams) -> RequestOutput:
        return [output async for output in engine.generate("a", params)][-1]

    monkeypatch.setattr(grammars_module, "compile_grammar", slow)
    with grammar_engine(tmp_path) as engine:
        slow_task = asyncio.ensure_future(last_of(engine, following(COMPACT)))
        assert await asyncio.to_thread(began.wait, 20.0)
        free = await last_of(engine, FREE)
        assert not slow_task.done()
        may_end.set()
        check_record(await slow_task)
    assert len(free.outputs[0].token_ids) == FREE.max_tokens


def test_an_engine_whose_front_is_elsewhere_compiles_before_its_thread_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where HTTP servers run in processes of their own: the engine has compiled nothing yet."""
    names: list[str] = []
    compile_grammar = grammars_module.compile_grammar

    def watched(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return compile_grammar(*arguments)

    monkeypatch.setattr(grammars_module, "compile_grammar", watched)
    engine_side = Grammars(BACKEND.to_str, VOCAB_SIZE, {EOS})
    params = COMPACT
    with grammar_engine(tmp_path, grammars=engine_side) as engine:
        engine.front._grammars = Grammars(BACKEND.to_str, VOCAB_SIZE, {EOS})
        assert not engine_side.is_ready(params)
        (output,) = run_all(engine, [("a", following(params))])
        assert engine_side.is_ready(params)
    assert len(names) == 2
    assert not any(name.startswith("pagedcore-") for name in names), "neither the engine waits for a compiler nor other masks do"
    check_record(output)


@pytest.mark.parametrize("has_grammars", [False, True])
def test_a_form_that_only_the_engine_refuses_is_an_output_and_ends_nothing_else(tmp_path: Path, has_grammars: bool) -> None:
    """Its front may have another version of the library, or none to check with."""
    with grammar_engine(tmp_path) as engine:
        if not has_grammars:
            engine.loop.grammars = None
        engine.front.prepare = lambda params: None  # type: ignore[method-assign]
        refused, free = run_all(engine, [("a", following({"json": {"type": "strin"}})), ("b", FREE)])
        engine.check()
    assert refused.status == "rejected"
    assert isinstance(refused.error, InvalidRequestError)
    assert ("Invalid type" if has_grammars else "needs a tokenizer") in str(refused.error)
    assert free.status == "completed"


def test_without_a_tokenizer_no_form_can_be_followed() -> None:
    built = make_engine()
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        list(built.engine.generate_sync([1, 2], following({"regex": "a"})))
    built.engine.close_sync()
