"""`pagedcore advise`: a recorded trace in, sentences and tables, or JSON, out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore import cli
from pagedcore.advice.trace import TracedRequest
from support.traffic import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> str:
    documents = [list(range(1000 * d, 1000 * d + 64)) for d in range(4)]
    write_trace(
        tmp_path / "t.jsonl",
        [
            TracedRequest(
                request_id=str(n), arrival_s=n, prompt_token_ids=[*documents[n % 4], n], num_output_tokens=1, tenant="[b]acme[/b]"
            )
            for n in range(40)
        ],
    )
    return str(tmp_path / "t.jsonl")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_sentences_come_first_then_the_curve_and_the_costliest_prefixes(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", trace, "--num-blocks", "12") == 0
    out = capsys.readouterr().out
    assert out.startswith("A pool twice as large (num_kv_blocks=24) would raise the hit rate from 0 % to 89 %.\n")
    [row] = [line for line in out.splitlines() if line.split()[1:2] == ["16"]]
    assert row.count("89 %") == 3
    assert "prefixes that cost most recomputation" in out
    assert "576" in out
    assert "[b]acme[/b]" in out
    assert "│ 39 " in out  # the latest request with one of them


def test_json_is_one_object(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", trace, "--num-blocks", "12", "--block-size", "32", "--json") == 0
    advice = json.loads(capsys.readouterr().out)
    assert {point["num_blocks"] for point in advice["curve"] if point["block_size"] == 32} <= {3, 6, 12, 24, 48, 96}
    assert advice["num_lookups"] == 40


def test_a_trace_that_is_none_ends_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text("hello\n")
    assert run("advise", str(tmp_path / "t.jsonl"), "--num-blocks", "12") == cli.USAGE_EXIT_CODE
    assert capsys.readouterr().err.startswith("pagedcore: Line 1 of ")


def test_the_pool_must_be_told(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("advise", trace) == cli.USAGE_EXIT_CODE
    assert "--num-blocks" in capsys.readouterr().err
