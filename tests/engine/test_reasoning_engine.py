"""A form that begins after the model's reasoning, through the whole engine: the random model ends it where its draw does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagedcore.outputs import CompletionOutput, RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_outputs import StructuredOutputsParams
from support.grammar_engine import grammar_engine, run_all
from support.grammars import BACKEND, EOS

RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 999, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
    "additionalProperties": False,
}
END, START = "stop", "my"
"""Texts that the model's tokens can write, as one and as several."""
FREE = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
SOON = {BACKEND.token_to_id(END): 3.0, EOS: -100.0}
"""Reasoning of some twenty tokens that end-of-sequence does not cut off."""


def reasoning(start: str | None = None, **changes: Any) -> SamplingParams:
    form = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True, reasoning_end=END, reasoning_start=start)
    return SamplingParams(**{"max_tokens": 200, "structured_outputs": form, "logit_bias": SOON, **changes})


def check_record(choice: CompletionOutput) -> str:
    """The reasoning, of an output that has it and then a record and its end."""
    said, end, record = choice.text.partition(END)
    assert (choice.finish_reason, end, choice.token_ids[-1]) == ("stop", END, EOS)
    assert list(json.loads(record)) == ["id", "ok"]
    return said


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_whatever_the_schedule_each_output_reasons_freely_and_then_follows_its_form(tmp_path: Path) -> None:
    requests = [(f"prompt {index}", reasoning(seed=index) if index % 3 else FREE.replace(seed=index)) for index in range(12)]
    runs = []
    for overlap in (False, True):
        with grammar_engine(tmp_path, overlap=overlap, max_model_len=256) as engine:
            runs.append(run_all(engine, requests))
            alone = [run_all(engine, [request])[0] for request in requests]
            engine.check()
        assert tokens_of(alone) == tokens_of(runs[-1])
    assert tokens_of(runs[0]) == tokens_of(runs[1])
    said = [check_record(output.outputs[0]) for index, output in enumerate(runs[0]) if index % 3]
    assert sum(len(text) > 5 for text in said) > 4, "they hardly reasoned"


def test_reasoning_is_what_the_model_says_without_a_form(tmp_path: Path) -> None:
    params = reasoning(seed=5, logprobs=2)
    with grammar_engine(tmp_path, max_model_len=256) as engine:
        (held,) = run_all(engine, [("a", params)])
        (free,) = run_all(engine, [("a", params.replace(structured_outputs=None, stop=END, include_stop_str_in_output=True))])
    check_record(held.outputs[0])
    num_free = len(free.outputs[0].token_ids)
    assert num_free > 5
    assert held.outputs[0].token_ids[:num_free] == free.outputs[0].token_ids
    assert held.outputs[0].logprobs is not None
    assert free.outputs[0].logprobs is not None
    assert held.outputs[0].logprobs[:num_free] == free.outputs[0].logprobs
    assert len(held.outputs[0].logprobs) == len(held.outputs[0].token_ids)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_preempted_output_goes_on_reasoning_or_where_its_form_was(tmp_path: Path, overlap: bool) -> None:
    requests = [("p" * 20, reasoning(seed=index, max_tokens=140)) for index in range(6)]
    with grammar_engine(tmp_path, num_blocks=24, overlap=overlap, max_model_len=180, enable_prefix_caching=False) as engine:
        outputs = run_all(engine, requests)
        alone = [run_all(engine, [request])[0] for request in requests]
    assert sum(output.num_preemptions for output in outputs) > 0, "the pool was large enough for all"
    assert tokens_of(outputs) == tokens_of(alone)
    for output in outputs:
        check_record(output.outputs[0])


def test_every_choice_ends_its_own_reasoning(tmp_path: Path) -> None:
    with grammar_engine(tmp_path, max_model_len=256) as engine:
        (output,) = run_all(engine, [("a", reasoning(n=5, seed=3))])
    assert len({check_record(choice) for choice in output.outputs}) > 1


def test_an_output_that_does_not_open_its_reasoning_follows_the_form_at_once(tmp_path: Path) -> None:
    opens, begins = ({**SOON, BACKEND.token_to_id(token): 100.0} for token in (START, "{"))
    with grammar_engine(tmp_path, max_model_len=256) as engine:
        plain, thinking = run_all(engine, [("a", reasoning(START, seed=1, logit_bias=bias)) for bias in (begins, opens)])
    assert list(json.loads(plain.outputs[0].text)) == ["id", "ok"]
    assert thinking.outputs[0].text.startswith(START * 3), "nothing but the draw decides while it reasons"


def test_what_ends_while_it_reasons_has_reasoning_only(tmp_path: Path) -> None:
    never = {BACKEND.token_to_id(END): -100.0}
    letter = BACKEND.token_to_id("q")
    with grammar_engine(tmp_path, max_model_len=256) as engine:
        cut, ended, stopped = run_all(
            engine,
            [
                ("a", reasoning(seed=1, max_tokens=30, logit_bias={**never, EOS: -100.0})),
                ("a", reasoning(seed=1, logit_bias={**never, EOS: 5.0}, min_tokens=2)),
                ("a", reasoning(seed=1, logit_bias={**never, EOS: -100.0, letter: 5.0}, stop="q")),
            ],
        )
    endings = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in (cut, ended, stopped)]
    assert endings == [("length", None), ("stop", None), ("stop", "q")]
    assert len(cut.outputs[0].token_ids) == 30
    assert ended.outputs[0].token_ids[-1] == EOS
    assert all(output.status == "completed" and END not in output.outputs[0].text for output in (cut, ended, stopped))


def test_an_output_that_streams_only_ever_grows(tmp_path: Path) -> None:
    with grammar_engine(tmp_path, max_model_len=256) as engine:
        texts = [output.outputs[0].text for output in engine.generate_sync("a", reasoning(seed=4))]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert END in texts[-1]
    assert len(texts) > 10
