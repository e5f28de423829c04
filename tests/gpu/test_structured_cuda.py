"""Outputs that follow a grammar where steps are CUDA graphs and the next one is planned ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.gpu
pytest.importorskip("llguidance")

from support.grammar_engine import grammar_engine, run_all  # noqa: E402  after the check for the library

RECORD = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "tag": {"enum": ["hello", "bad"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
HELD = SamplingParams(max_tokens=80, structured_outputs=StructuredOutputsParams(json=RECORD, disable_any_whitespace=True))
FREE = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_records_validate_beside_free_texts_which_get_what_they_get_alone(tmp_path: Path, overlap: bool) -> None:
    requests = [(f"prompt {index}", (HELD if index % 2 else FREE).replace(seed=index)) for index in range(12)]
    with grammar_engine(tmp_path, device="cuda", overlap=overlap) as engine:
        together = run_all(engine, requests)
        alone = [run_all(engine, [request])[0] for request in requests[::2]]
        engine.check()
    for output in together[1::2]:
        assert output.outputs[0].finish_reason == "stop"
        assert list(json.loads(output.outputs[0].text)) == ["id", "tag"]
    assert [output.outputs[0].token_ids for output in together[::2]] == [output.outputs[0].token_ids for output in alone]
