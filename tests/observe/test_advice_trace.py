"""Traces: what is written is read back, what is wrong is named by its line, and offline advice needs no engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedcore.advice.offline import advise
from pagedcore.advice.trace import TracedRequest, TraceWriter, read_trace
from pagedcore.core.block_hash import ROOT_HASH, hash_blocks, make_domain
from pagedcore.errors import ConfigError
from support.traffic import write_trace


def traced(number: int, prompt: list[int], **fields: Any) -> TracedRequest:
    facts = {"arrival_s": float(number), "num_output_tokens": 4, **fields}
    return TracedRequest(request_id=f"r{number}", prompt_token_ids=prompt, **facts)


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    requests = [
        traced(0, [1, 2, 3], tenant="a", cache_salt="s", is_greedy=True, admitted_s=0.5, finished_s=2.0),
        traced(1, [4]),
    ]
    write_trace(tmp_path / "t.jsonl", requests)
    assert list(read_trace(tmp_path / "t.jsonl")) == requests
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2


def test_a_foreign_log_needs_four_fields_and_may_have_more(tmp_path: Path) -> None:
    line = {"request_id": "x", "arrival_s": 3, "prompt_token_ids": [5, 6], "num_output_tokens": 0, "model": "m"}
    (tmp_path / "t.jsonl").write_text("\n" + json.dumps(line) + "\n\n")
    [request] = read_trace(tmp_path / "t.jsonl")
    assert (request.start_s, request.end_s, request.tenant, request.is_greedy) == (3, 3, None, False)


GOOD = {"request_id": "x", "arrival_s": 3, "prompt_token_ids": [5, 6], "num_output_tokens": 0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Line 2 of .* is not valid JSON: .*; a trace has one JSON object a line."),
        ("[1]", r"Line 2 of .* is \[1\] and must be a JSON object."),
        (json.dumps({"request_id": "x"}), "Line 2 of .* has no arrival_s."),
        (json.dumps({**GOOD, "prompt_token_ids": []}), r"prompt_token_ids is \[\] and must be a list of at least one token id."),
        (json.dumps({**GOOD, "prompt_token_ids": [2**31]}), "prompt_token_ids is .* and must be a list"),
        (json.dumps({**GOOD, "prompt_token_ids": [True]}), "prompt_token_ids is .* and must be a list"),
        (json.dumps({**GOOD, "num_output_tokens": -1}), "num_output_tokens is -1 and must be a number of tokens from 0."),
        (json.dumps({**GOOD, "arrival_s": None}), "arrival_s is None and must be a number of seconds."),
        (json.dumps({**GOOD, "finished_s": "3"}), "finished_s is '3' and must be a number of seconds or null."),
        (json.dumps({**GOOD, "arrival_s": float("nan")}), "arrival_s is nan and must be a number of seconds."),
        (json.dumps({**GOOD, "tenant": 3}), "tenant is 3 and must be a text or null."),
        (json.dumps({**GOOD, "is_greedy": 1}), "is_greedy is 1 and must be true or false."),
        (json.dumps({**GOOD, "request_id": 1}), "request_id is 1 and must be a text."),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        list(read_trace(tmp_path / "t.jsonl"))


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The trace .*none.jsonl' cannot be read: No such file or directory."):
        list(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"The trace file .* cannot be written: No such file or directory."):
        TraceWriter(tmp_path / "no" / "t.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"request_id": "\xe9"}\n')
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        list(read_trace(tmp_path / "latin.jsonl"))


def test_an_empty_trace_gives_empty_advice() -> None:
    advice = advise([], 16, 100)
    assert (advice.hit_rate, advice.curve, advice.window_s, advice.num_lookups) == (None, (), 0.0, 0)
    assert advice.sentences == ("No request has been looked up yet, so there is nothing to advise.",)


def test_a_loop_over_more_than_the_pool_holds_asks_for_a_pool_twice_as_large() -> None:
    """Four documents of 64 tokens in a pool of 12 blocks of 16."""
    documents = [list(range(1000 * d, 1000 * d + 64)) for d in range(4)]
    requests = [traced(number, [*documents[number % 4], number]) for number in range(40)]
    advice = advise(requests, 16, 12)
    assert advice.hit_rate == 0.0
    assert advice.ideal_hit_rate == 36 * 64 / (40 * 65)
    assert advice.sentences[0] == "A pool twice as large (num_kv_blocks=24) would raise the hit rate from 0 % to 89 %."
    assert advice.window_s == 39.0
    assert [(p.num_tokens, p.recomputed_tokens, p.num_requests) for p in advice.costliest_prefixes] == [(64, 9 * 64, 9)] * 4
    assert {p.latest_request_id for p in advice.costliest_prefixes} == {request.request_id for request in requests[-4:]}
    hashes = hash_blocks(ROOT_HASH, make_domain(None, None), documents[0], 16)
    assert hashes[-1].hex() in {prefix.prefix for prefix in advice.costliest_prefixes}


def test_requests_that_overlap_hold_their_blocks_together() -> None:
    """Two of four full blocks and a partly filled one each, while the four blocks of a third one wait for it to come again."""
    first = list(range(64))
    alone = [traced(0, [*first, 1]), traced(1, list(range(200, 265))), traced(2, list(range(300, 365))), traced(3, [*first, 2])]
    together = [alone[0], *(traced(n, alone[n].prompt_token_ids, finished_s=9.0) for n in (1, 2)), alone[3]]
    assert advise(alone, 16, 13).hit_rate == 64 / 260
    assert advise(together, 16, 14).hit_rate == 64 / 260
    assert advise(together, 16, 13).hit_rate == 48 / 260
    assert advise(together, 16, 11).hit_rate == 16 / 260


def test_lines_may_come_in_any_order_and_say_an_id_twice() -> None:
    requests = [traced(0, [*range(32), 1]), traced(0, [*range(32), 2], arrival_s=5.0)]
    assert advise(requests, 16, 100) == advise(requests[::-1], 16, 100)
    assert advise(requests, 16, 100).hit_rate == 32 / 66


def test_a_request_that_ends_when_another_begins_has_given_its_blocks_back() -> None:
    """Each holds five blocks: two at once are more than this pool has."""
    requests = [traced(n, list(range(100 * n, 100 * n + 65)), finished_s=n + 1.0) for n in range(4)]
    assert {point.pool_factor for point in advise(requests, 16, 8).curve if point.block_size == 16} == {1.0, 2.0, 4.0, 8.0}
    late = [replace(request, finished_s=request.arrival_s + 1.5) for request in requests]
    assert {point.pool_factor for point in advise(late, 16, 8).curve if point.block_size == 16} == {2.0, 4.0, 8.0}
