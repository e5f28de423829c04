"""`pagedcore status`: what it prints of a live server, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagedcore import cli
from pagedcore.commands.remote import _base
from pagedcore.errors import ConfigError
from pagedcore.openai import ServerSettings, build_app
from support.console import make_stats
from support.fake_client import FakeClient
from support.live_server import live_server
from support.served import free_port


@contextmanager
def server(*stats: dict[str, Any], settings: ServerSettings | None = None) -> Iterator[str]:
    client = FakeClient()
    client.answers["stats"] = list(stats)
    with live_server(build_app(client, settings)) as url:
        yield url


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", *arguments])
    return int(ended.value.code or 0)


def test_a_server_that_does_well_ends_with_0_and_shows_five_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with server(make_stats()) as url:
        assert run(url) == 0
    shown = capsys.readouterr().out
    for name in ("engine 0: fake", "device busy", "running requests", "cache hit rate", "p99 to first token", "blocked"):
        assert name in shown
    assert "attention" not in shown


def test_what_needs_attention_ends_with_1_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with server(make_stats(), make_stats(engine="1", num_waiting=2, num_waiting_by_reason={"blocks": 2})) as url:
        assert run(url) == 1
    shown = capsys.readouterr().out
    assert "engine 1: fake" in shown
    assert "blocked: The pool is full" in shown


def test_json_holds_the_same_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with server(make_stats(ttft_s=2.5)) as url:
        assert run(url, "--json") == 1
    body = json.loads(capsys.readouterr().out)
    assert body["needs_attention"] is True
    (engine,) = body["engines"]
    assert [one["verdict"] for one in engine["indicators"]] == ["good", "good", "good", "attention", "good"]
    assert (engine["engine"], engine["indicators"][3]["value"]) == ("0", 2.5)


@pytest.mark.parametrize(
    ("facts", "flag", "value"),
    [
        ({"busy": 0.3}, "--device-busy", "0.3"),
        ({"hit_rate": 0.4}, "--hit-rate", "0.4"),
        ({"ttft_s": 3.0}, "--ttft-p99", "4"),
        ({"num_waiting": 2}, "--blocked", "2"),
    ],
)
def test_each_target_is_a_flag(facts: dict[str, Any], flag: str, value: str) -> None:
    with server(make_stats(**facts)) as url:
        assert run(url) == 1
        assert run(url, flag, value) == 0


def test_what_stands_out_is_printed_and_is_in_the_json_and_its_target_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    stats = make_stats()
    stats["last_minute"] |= {"token_gap_max_s": 2.0, "token_gap_max_step_tokens": 900, "token_gap_max_step_prefill_tokens": 899}
    with server(stats) as url:
        assert run(url) == 0
        assert "while one step computed 899 prompt tokens. Lower max_num_batched_tokens" in capsys.readouterr().out
        assert run(url, "--json") == 0
        (finding,) = json.loads(capsys.readouterr().out)["engines"][0]["findings"]
        assert finding.startswith("Answers stood still for up to 2.0 s")
        assert run(url, "--token-gap", "2.1") == 0
        assert "stood still" not in capsys.readouterr().out


def test_the_share_that_may_run_is_a_flag() -> None:
    with server(make_stats(num_waiting=1)) as url:
        assert run(url, "--blocked", "1") == 0
        assert run(url, "--blocked", "1", "--running-share", "0.5") == 1


def test_a_key_is_sent_and_asked_for_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with server(make_stats(), settings=ServerSettings(api_keys=("sesame",), tenants={"red-key": "red"})) as url:
        assert run(url) == 2
        assert "--api-key" in capsys.readouterr().err
        assert run(url, "--api-key", "red-key") == 2
        assert "belongs to a tenant" in capsys.readouterr().err
        assert run(url, "--api-key", "sesame") == 0
        monkeypatch.setenv("PAGEDCORE_API_KEY", "sesame")
        assert run(url) == 0


def test_no_server_and_one_without_these_routes_end_with_1_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"http://127.0.0.1:{free_port()}") == 1
    assert "is a pagedcore server there?" in capsys.readouterr().err
    with server(make_stats(), settings=ServerSettings(allow_operator_routes=False)) as url:
        assert run(url) == 1
    assert "allow_operator_routes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:8000", "http://host:8000/v1/stats"),
        ("http://host:8000/v1/", "http://host:8000/v1/stats"),
        ("https://host/llm", "https://host/llm/v1/stats"),
        ("localhost:8000", "http://localhost:8000/v1/stats"),
    ],
)
def test_a_base_url_with_or_without_v1_will_do(url: str, address: str) -> None:
    assert _base(url) + "/v1/stats" == address


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host", "http://"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be that of a server"):
        _base(url)
    assert run(url) == 2


def test_a_wrong_target_is_refused_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:1", "--hit-rate", "85") == 2
    assert "hit_rate is 85.0 and must be between 0 and 1" in capsys.readouterr().err
