"""The stories of docs/observability.md, played on the embedded model: each shows its fault in the numbers, and its cure."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from support.repository import ROOT

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.needs_torch]

FOLDER = ROOT / "examples" / "slow_service"


@pytest.fixture
def story(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that the test names, as it is found when it is run: beside the others."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param.removesuffix(".py"))


def told(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any, str]:
    """What was seen before and after, and what was printed."""
    before, after = importlib.import_module("stage").tell(story.STORY)
    return before, after, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("story", ["timestamp_first.py"], indirect=True)
def test_a_timestamp_in_front_is_found_named_and_cured(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, shown = told(story, capsys)
    assert before["hit rate (%)"] == before["ideal hit rate (%)"] == 0.0
    assert before["of them computed"] == before["prompt tokens"] == after["prompt tokens"]
    assert after["hit rate (%)"] > 80
    assert before["prompts part at token"] < 16 < after["prompts part at token"]
    part_at = before["prompts part at token"]
    assert f"The nearest cached prompt is the same up to token {part_at}." in shown
    assert f"diverge at token {part_at}, before a shared body of" in shown
    assert shown.count("move what varies behind it") == 1  # before the cure alone


@pytest.mark.parametrize("story", ["small_pool.py"], indirect=True)
def test_a_small_pool_is_found_and_a_larger_one_does_what_was_predicted(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, shown = told(story, capsys)
    predicted = before[f"the advice's hit rate for {2 * story.NUM_BLOCKS} blocks (%)"]
    assert abs(predicted - after["hit rate (%)"]) <= 1.0
    assert after["hit rate (%)"] > before["hit rate (%)"] + 15
    assert f"A pool twice as large (num_kv_blocks={2 * story.NUM_BLOCKS}) would raise the hit rate" in shown
    assert before["ghost hits"] == before["blocks missed since evicted"] > 5 * after["blocks missed since evicted"]
    assert before["prompt tokens computed twice"] == 16 * before["blocks missed since evicted"]
    assert before["evictions"] > after["evictions"] > 0


@pytest.mark.parametrize("story", ["flooding_tenant.py"], indirect=True)
def test_a_flood_holds_up_others_until_it_goes_last(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, _ = told(story, capsys)
    assert before["reports let in while an order waited"] >= story.NUM_REPORTS - 2 * story.MAX_NUM_SEQS
    assert after["reports let in while an order waited"] == 0
    assert "max_num_seqs" in before["the first order waited for"]
    assert before["tokens generated"] == after["tokens generated"]


@pytest.mark.parametrize("story", ["long_prefill.py"], indirect=True)
def test_a_long_prompt_is_one_step_until_the_budget_cuts_it(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, shown = told(story, capsys)
    num_tokens, budget = before["tokens of the contract"], after["max_num_batched_tokens"]
    assert (before["steps that computed it"], before["tokens of the largest step"]) == (1, num_tokens + story.NUM_CHATS)
    assert after["tokens of the largest step"] == budget
    assert after["steps that computed it"] == -(-num_tokens // (budget - story.NUM_CHATS))
    assert before["longest wait for a next token (ms)"] > 2 * after["longest wait for a next token (ms)"]
    is_stall = before["longest wait for a next token (ms)"] >= max(
        500, 4 * before["usual wait (ms)"]
    )  # what is said depends on the machine
    assert (f"while one step computed {num_tokens:,} prompt tokens. Lower max_num_batched_tokens, now 2,048" in shown) == is_stall
    path = story.trace_file(before["max_num_batched_tokens"])
    assert f"The trace file is {path} " in shown  # whole, for a terminal of any width
    trace = json.loads(path.read_text(encoding="utf-8"))
    steps = [event["args"] for event in trace["traceEvents"] if event["name"] == "prefill step"]
    assert max(step["num_prefill_tokens"] for step in steps) == num_tokens


@pytest.mark.parametrize("story", ["slow_reader.py"], indirect=True)
def test_a_slow_reader_holds_up_nobody_but_itself(story: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after, _ = told(story, capsys)
    assert before["tokens stored when the engine was done"] < 0.8 * story.NUM_TOKENS
    for seen in (before, after):
        assert seen["requests that ran then"] == seen["blocks in use then"] == 0
    assert (before["writes"], after["writes"] < before["writes"]) == (story.NUM_TOKENS, True)
    assert before["transport: the difference (s)"] > after["transport: the difference (s)"]


def test_every_script_is_played_here() -> None:
    played = {"timestamp_first.py", "small_pool.py", "flooding_tenant.py", "long_prefill.py", "slow_reader.py"}
    assert {path.name for path in FOLDER.glob("*.py")} == played | {"stage.py"}


def test_a_story_is_a_command() -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "slow_reader.py"), "--help"],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "A client that reads slowly" in done.stdout
    assert "--ui" in done.stdout
