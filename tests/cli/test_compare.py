"""`pagedcore compare` without a model: what it prints, what it asks of an engine, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore import cli
from pagedcore.commands import trial as trial_module
from pagedcore.commands.comparison import (
    Agreement,
    Comparison,
    ModelReport,
    SpeedScope,
    TextScope,
    TrafficReport,
    TrafficScope,
    perplexity,
)
from pagedcore.commands.comparison_table import caption, meaning, rows, show, traffic_rows
from pagedcore.commands.throughput import Result, run_prompts
from pagedcore.commands.trial import MAX_PROMPTS, Traffic, Trial, TrialResult, cut_prompts, make_trial, run_trial
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineError, InvalidRequestError, PromptTooLongError
from pagedcore.models.progress import Progress
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import RequestOutput
from pagedcore.warm_up import read_warm_up_file
from support.scripted_engine import ScriptedEngine

TRAFFIC_A = TrafficReport(
    page_hit_rate=0.5, prefix_hit_rate=0.4, pool_hit_rate=0.25, kv_cache_bytes=4_000_000, num_blocks=100, pool_tokens=1600,
    output_tokens_per_s=80.0, first_token_p50_s=0.02,
)  # fmt: skip
REPORT_A = ModelReport(
    model="dense", quantization=None, linear_backend="torch", device="cpu", dtype="float32", perplexity=10.0, checkpoint_bytes=200_000_000,
    weight_bytes=400_000_000, output_tokens_per_s=50.0, slowest_output_tokens_per_s=48.0, fastest_output_tokens_per_s=51.5,
    first_token_p50_s=0.1, traffic=None,
)  # fmt: skip
REPORT_B = dataclasses.replace(
    REPORT_A, model="small", quantization="gptq 4-bit group 64", linear_backend="dequantized", perplexity=11.23,
    checkpoint_bytes=54_000_000, weight_bytes=108_000_000, output_tokens_per_s=70.0, slowest_output_tokens_per_s=66.6,
    fastest_output_tokens_per_s=70.1, first_token_p50_s=0.05,
)  # fmt: skip
COMPARISON = Comparison(
    a=REPORT_A,
    b=REPORT_B,
    agreement=Agreement(
        num_scored_tokens=2046, mean_nll_a_nats=2.3, mean_nll_b_nats=2.4, mean_kl_nats=0.0612, p99_kl_nats=0.5, top1_fraction=0.912
    ),
    text=TextScope(num_text_tokens=2048, num_windows=2, window_tokens=1024, vocab_size=49152, num_left_out_logits=0),
    speed=SpeedScope(num_prompts=16, prompt_tokens=128, output_tokens=32, num_rounds=3),
    traffic=None,
)
WITH_TRAFFIC = dataclasses.replace(
    COMPARISON,
    a=dataclasses.replace(REPORT_A, traffic=TRAFFIC_A),
    b=dataclasses.replace(REPORT_B, traffic=dataclasses.replace(TRAFFIC_A, prefix_hit_rate=0.45, num_blocks=250, pool_tokens=4000)),
    traffic=TrafficScope(num_requests=12, num_prompt_tokens=3456, output_tokens=16, concurrency=8),
)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_the_sentence_says_the_numbers() -> None:
    assert meaning(COMPARISON) == (
        "B's perplexity is 12.3% higher; its likeliest token is A's in 91.2% of positions; its weights take 27% of A's memory; "
        "it is 1.40 x as fast here."
    )


@pytest.mark.parametrize(
    ("range_b", "said"),
    [
        ((45.0, 47.9), "it is 0.94 x as fast here."),
        ((45.0, 48.0), "its speed here is A's within the spread of 3 rounds."),
        ((49.0, 50.0), "its speed here is A's within the spread of 3 rounds."),
        ((40.0, 60.0), "its speed here is A's within the spread of 3 rounds."),
        ((51.5, 60.0), "its speed here is A's within the spread of 3 rounds."),
        ((51.6, 60.0), "it is 0.94 x as fast here."),
    ],
)
def test_a_speed_is_called_another_only_where_the_rounds_of_a_and_b_do_not_overlap(range_b: tuple[float, float], said: str) -> None:
    """A's rounds are from 48.0 to 51.5."""
    slowest, fastest = range_b
    spread = {"slowest_output_tokens_per_s": slowest, "fastest_output_tokens_per_s": fastest, "output_tokens_per_s": 47.0}
    changed = dataclasses.replace(COMPARISON, b=dataclasses.replace(REPORT_B, **spread))
    assert meaning(changed).split("; ")[-1] == said


@pytest.mark.parametrize(("perplexity_b", "said"), [(9.0, "10.0% lower"), (10.0001, "the same to 0.1%"), (10.02, "0.2% higher")])
def test_the_sentence_says_higher_lower_or_the_same(perplexity_b: float, said: str) -> None:
    changed = dataclasses.replace(COMPARISON, b=dataclasses.replace(REPORT_B, perplexity=perplexity_b))
    assert meaning(changed).startswith(f"B's perplexity is {said}; ")


def test_the_table_has_a_row_for_each_number_and_relates_b_to_a() -> None:
    assert rows(COMPARISON) == [
        ("model", "dense", "small", ""),
        ("quantization", "none", "gptq 4-bit group 64", ""),
        ("matrix products", "torch", "dequantized", ""),
        ("perplexity", "10.000", "11.230", "+12.3%"),
        ("KL(A || B), mean", "", "0.06120 nats", ""),
        ("KL(A || B), 99th percentile", "", "0.50000 nats", ""),
        ("likeliest token is A's", "", "91.2%", ""),
        ("weight files", "200.0 MB", "54.0 MB", "27%"),
        ("weights in memory", "400.0 MB", "108.0 MB", "27%"),
        ("output tokens per second", "50.0", "70.0", "1.40 x"),
        ("slowest and fastest of 3 rounds", "48.0 to 51.5", "66.6 to 70.1", ""),
        ("time to first token, p50", "100.0 ms", "50.0 ms", "0.50 x"),
    ]


def test_traffic_adds_hit_rates_by_level_and_the_memory_of_both() -> None:
    assert WITH_TRAFFIC.a.traffic is not None
    assert WITH_TRAFFIC.b.traffic is not None
    assert traffic_rows(WITH_TRAFFIC.a.traffic, WITH_TRAFFIC.b.traffic) == [
        ("hit rate, page", "50.0%", "50.0%", "+0.0 points"),
        ("hit rate, prefix", "40.0%", "45.0%", "+5.0 points"),
        ("hit rate, pool", "25.0%", "25.0%", "+0.0 points"),
        ("KV cache", "4.0 MB", "4.0 MB", "100%"),
        ("KV blocks", "100", "250", "2.50 x"),
        ("tokens the pool holds", "1,600", "4,000", "2.50 x"),
        ("output tokens per second", "80.0", "80.0", "1.00 x"),
        ("time to first token, p50", "20.0 ms", "20.0 ms", "1.00 x"),
    ]
    assert meaning(WITH_TRAFFIC).endswith(
        " On the same requests its prefix cache served 45.0% of the prompt tokens (A's 40.0%), and its pool holds 4,000 tokens (A's 1,600)."
    )


def test_the_caption_says_what_was_measured_and_that_a_windows_first_token_is_not_scored() -> None:
    assert caption(WITH_TRAFFIC).splitlines() == [
        "cpu, float32. 2,048 tokens of text, 2,046 scored.",
        "Scored in 2 windows of at most 1,024, each from an empty cache; the first token of a window is not scored.",
        "Speed: 16 prompts of 128 tokens at once, 32 output tokens each; median of 3 rounds.",
        "Traffic: 12 requests of 3,456 tokens in all, 8 at a time, 16 output tokens each.",
    ]
    padded = dataclasses.replace(COMPARISON, text=dataclasses.replace(COMPARISON.text, num_left_out_logits=64))
    assert "Compared over 49,152 logits: the 64 more of one model are padding." in caption(padded)


def test_the_printed_table_holds_all_of_it() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    show(console, WITH_TRAFFIC)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    expected = [cell for row in [*rows(WITH_TRAFFIC), *traffic_rows(WITH_TRAFFIC.a.traffic, WITH_TRAFFIC.b.traffic)] for cell in row]  # type: ignore[arg-type]
    assert not [cell for cell in expected if cell not in printed]
    assert printed.endswith(meaning(WITH_TRAFFIC) + "\n")


def test_json_has_the_fields_and_b_over_a() -> None:
    found = WITH_TRAFFIC.as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["a"]["perplexity"] == 10.0
    assert found["b"]["traffic"]["prefix_hit_rate"] == 0.45
    assert (found["a"]["slowest_output_tokens_per_s"], found["a"]["fastest_output_tokens_per_s"]) == (48.0, 51.5)
    assert found["speed"]["num_rounds"] == 3
    assert found["relative"] == {
        "perplexity": pytest.approx(1.123),
        "checkpoint_bytes": 0.27,
        "weight_bytes": 0.27,
        "output_tokens_per_s": 1.4,
        "first_token_p50_s": 0.5,
    }
    assert set(found) == {"a", "b", "agreement", "text", "speed", "traffic", "relative"}


def test_what_is_no_number_is_null_in_json_and_a_dash_in_the_table() -> None:
    nothing = dataclasses.replace(TRAFFIC_A, pool_hit_rate=float("nan"))
    broken = dataclasses.replace(
        WITH_TRAFFIC,
        a=dataclasses.replace(REPORT_A, checkpoint_bytes=0, traffic=nothing),
        b=dataclasses.replace(REPORT_B, perplexity=float("inf"), checkpoint_bytes=0, traffic=nothing),
    )
    found = broken.as_json()
    assert found["b"]["perplexity"] is None
    assert found["relative"]["perplexity"] is None
    assert found["relative"]["checkpoint_bytes"] is None
    assert found["a"]["traffic"]["pool_hit_rate"] is None
    assert ("weight files", "0 bytes", "0 bytes", "-") in rows(broken)
    assert ("hit rate, pool", "-", "-", "-") in traffic_rows(nothing, nothing)


def test_perplexity_is_the_exponential_and_infinite_where_that_is_no_float() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(2.0) == pytest.approx(7.38905609893065)
    assert perplexity(800.0) == float("inf")


@given(num_text=st.integers(2, 400), num_tokens=st.integers(1, 200))
def test_prompts_are_equal_pieces_spread_from_the_texts_start_to_its_end(num_text: int, num_tokens: int) -> None:
    text = list(range(num_text))
    prompts = [list(prompt) for prompt in cut_prompts(text, num_tokens)]
    length = min(num_tokens, num_text)
    assert len(prompts) == min(MAX_PROMPTS, num_text - length + 1)
    assert all(prompt == list(range(prompt[0], prompt[0] + length)) for prompt in prompts)
    assert prompts[0][0] == 0
    assert len(prompts) == 1 or prompts[-1][-1] == num_text - 1
    assert len({prompt[0] for prompt in prompts}) == len(prompts)


class FakeText:
    """Encodes a character as its code point and marks what asked for special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(char) for char in text]

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        assert not template_kwargs, "a request is to be answered"
        return "".join(message["content"] for message in messages) + "?"


def test_requests_are_texts_with_special_tokens_and_conversations_to_be_answered() -> None:
    traffic = Traffic(prompts=["ab", [{"role": "user", "content": "ab"}]], concurrency=2, output_tokens=3)
    trial = make_trial(range(500), traffic, FakeText(), 64)  # type: ignore[arg-type]
    assert trial.requests == [[0, 97, 98], [97, 98, 63]]
    assert trial.traffic_scope() == TrafficScope(num_requests=2, num_prompt_tokens=6, output_tokens=3, concurrency=2)


@pytest.mark.parametrize(
    ("max_model_len", "scope"), [(2, (16, 1, 1, 3)), (64, (16, 32, 32, 3)), (100, (16, 68, 32, 3)), (8192, (16, 128, 32, 3))]
)
def test_prompt_and_output_fit_the_model(max_model_len: int, scope: tuple[int, int, int, int]) -> None:
    trial = make_trial(range(500), None, FakeText(), max_model_len)  # type: ignore[arg-type]
    assert dataclasses.astuple(trial.speed_scope()) == scope
    assert trial.traffic_scope() is None


def test_traffic_that_cannot_be_answered_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="holds no requests"):
        make_trial([1, 2], Traffic(prompts=[]), FakeText(), 64)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match=r"Request 2 .* has 61 tokens, and with 4 output tokens .* 64\."):
        make_trial([1, 2], Traffic(prompts=["a", "b" * 60], output_tokens=4), FakeText(), 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["concurrency", "output_tokens"])
def test_traffic_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} of the traffic is 0 and must be at least 1"):
        Traffic(prompts=["a"], **{name: 0})


class CrowdedEngine(ScriptedEngine):
    """Holds each request until as many as were promised are in flight, or none is left to come; counts the most at once."""

    def __init__(self, num_together: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(num_together)
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0

    def generate_sync(self, prompt: Any, *args: Any, **kwargs: Any) -> Iterator[RequestOutput]:
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.barrier.wait(60.0)
        yield from super().generate_sync(prompt, *args, **kwargs)
        with self.lock:
            self.in_flight -= 1


def test_so_many_requests_are_in_flight_and_no_more() -> None:
    engine = CrowdedEngine(num_together=3)
    ended: list[None] = []
    result = run_prompts(engine, [[number] * 4 for number in range(12)], 2, lambda: ended.append(None), concurrency=3)  # type: ignore[arg-type]
    assert engine.most_in_flight == 3
    assert len(ended) == 12
    assert (result.num_prompt_tokens, result.num_output_tokens) == (48, 24)
    assert result.first_token_p50_s == 0.25


def test_one_at_a_time_keeps_the_files_order() -> None:
    engine = ScriptedEngine()
    prompts = [[number] for number in range(20)]
    run_prompts(engine, prompts, 2, lambda: None, concurrency=1)  # type: ignore[arg-type]
    assert [prompt for prompt, _, _ in engine.asked] == prompts
    assert all(params.ignore_eos and params.temperature == 0.0 for _, params, _ in engine.asked)


class CachingEngine(ScriptedEngine):
    """Remembers what is done to it, in order. Its cache is empty at the `num_tries`th time of asking each time, or never."""

    def __init__(self, num_tries: int | None = 2) -> None:
        super().__init__()
        self.num_tries, self.tries = num_tries, 0
        self.events: list[str] = []
        self.lock = threading.Lock()

    def generate_sync(self, prompt: Any, *args: Any, **kwargs: Any) -> Iterator[RequestOutput]:
        with self.lock:
            if self.events[-1:] != ["load"]:
                self.events.append("load")
        yield from super().generate_sync(prompt, *args, **kwargs)

    def reset_prefix_cache(self) -> bool:
        self.tries += 1
        is_empty = self.num_tries is not None and self.tries % self.num_tries == 0
        if is_empty:
            self.events.append("empty")
        return is_empty

    def check(self) -> None:
        pass

    def stats(self) -> StatsSnapshot:
        return StatsSnapshot(num_active_blocks=7, num_running=1, num_waiting=2)


def load_result(wall_s: float, first_token_s: float) -> Result:
    """Of 120 tokens."""
    return Result(
        wall_s=wall_s,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=120,
        first_token_s=[first_token_s],
        per_output_token_s=[],
    )


def run_scripted(engine: CachingEngine, monkeypatch: pytest.MonkeyPatch, progress: Progress = lambda *call: None) -> TrialResult:
    monkeypatch.setattr(trial_module, "AsyncEngine", lambda config: engine)
    trial = Trial(prompts=[[1], [2]], output_tokens=2, requests=[], traffic=None)
    return run_trial("A", EngineConfig(), trial, progress)


def test_each_of_three_rounds_begins_with_an_empty_prefix_cache_and_the_bar_counts_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = CachingEngine(), list[tuple[str, int, int]]()
    result = run_scripted(engine, monkeypatch, lambda *call: calls.append(call))
    assert engine.events == ["load", "empty", "empty", "load", "empty", "load", "empty", "load"]
    assert len(engine.asked) == 2 * (1 + 3)
    assert len(result.rounds) == 3
    assert sorted(call for call in calls if call[0] == "Timing A") == [("Timing A", done, 6) for done in range(7)]
    assert engine.is_closed


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_round_of_median_speed_is_reported_with_its_own_first_token(order: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the times to the first token nor the order of the rounds say which round it is."""
    slow, middle, fast = load_result(4.0, 0.1), load_result(3.0, 0.9), load_result(2.0, 0.3)
    warm_up = load_result(1.0, 0.0)
    loads = iter([warm_up, *((slow, middle, fast)[index] for index in order)])
    monkeypatch.setattr(trial_module, "run_prompts", lambda *args, **kwargs: next(loads))
    result = run_scripted(CachingEngine(), monkeypatch)
    speeds = [report.output_tokens_per_s for report in (result.slowest_round, result.median_round, result.fastest_round)]
    assert speeds == [30.0, 40.0, 60.0]
    assert result.median_round.first_token_p50_s == 0.9


def test_a_cache_that_does_not_get_empty_is_an_error_that_says_what_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by a second as it is looked at."""
    engine, clock = CachingEngine(num_tries=None), itertools.count(100)
    monkeypatch.setattr(trial_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(EngineError) as raised:
        run_scripted(engine, monkeypatch)
    assert str(raised.value) == (
        "The prefix cache could not be emptied within 10 s: "
        "7 KV blocks are held by 1 running and 2 waiting requests, or by a step in flight."
    )
    assert engine.tries == 11
    assert engine.is_closed


def test_a_traffic_file_that_is_not_there_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The traffic file .* cannot be read: .*; check --traffic\."):
        read_warm_up_file(tmp_path / "none", what="traffic file", flag="--traffic")


@pytest.mark.needs_torch
def test_a_traffic_file_of_json_lines_is_refused_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"a": 1}\n')
    assert run("compare", "x", "y", "--text", str(tmp_path / "t.txt"), "--traffic", str(path)) == 2
    assert capsys.readouterr().err == (
        f"pagedcore: Line 1 of the traffic file {str(path)!r} is a JSON object or list; "
        "give a JSON list of texts and lists of messages, or one plain text a line.\n"
    )


class FakeCompare:
    """Stands for `compare_models`; remembers what it was asked."""

    def __init__(self) -> None:
        self.configs: tuple[EngineConfig, EngineConfig] | None = None
        self.text = ""
        self.options: dict[str, Any] = {}
        self.failure: BaseException | None = None

    def compare_models(self, a: EngineConfig, b: EngineConfig, text: str, **options: Any) -> Comparison:
        self.configs, self.text, self.options = (a, b), text, options
        options["progress"]("Scoring", 1, 2)
        if self.failure is not None:
            raise self.failure
        return WITH_TRAFFIC


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCompare:
    compare = FakeCompare()
    module = ModuleType("pagedcore.commands.compare")
    module.compare_models = compare.compare_models  # type: ignore[attr-defined]
    module.read_text = lambda path: path.read_text()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedcore.commands.compare", module)
    return compare


def test_json_is_all_there_is_on_standard_output(fake: FakeCompare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    assert run("compare", "x", "y", "--text", str(tmp_path / "t.txt"), "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == WITH_TRAFFIC.as_json()
    assert "Scoring" in err


def test_flags_apply_to_both_and_the_rest_is_passed_on(fake: FakeCompare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    (tmp_path / "traffic.json").write_text('["one", "two"]')
    arguments = ["--window", "64", "--max-text-tokens", "500", "--traffic", str(tmp_path / "traffic.json"), "--concurrency", "3"]
    assert (
        run("compare", "x", "y", "--text", str(tmp_path / "t.txt"), *arguments, "--traffic-output-tokens", "5", "--block-size", "32") == 0
    )
    assert fake.configs == (EngineConfig(model="x", block_size=32), EngineConfig(model="y", block_size=32))
    assert fake.text == "some text"
    del fake.options["progress"]
    traffic = Traffic(prompts=["one", "two"], concurrency=3, output_tokens=5)
    assert fake.options == {"window": 64, "max_text_tokens": 500, "traffic": traffic}
    out = capsys.readouterr().out
    assert "pagedcore compare" in out
    assert out.endswith(meaning(WITH_TRAFFIC) + "\n")


def test_every_engine_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "--help") == 0
    shown = capsys.readouterr().out
    assert not [field for field in EngineConfig.__dataclass_fields__ if f"--{field.replace('_', '-')} " not in shown]


def test_a_third_model_is_refused(fake: FakeCompare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "x", "y", "--text", str(tmp_path / "t.txt"), "--model", "z") == 2
    assert capsys.readouterr().err == "pagedcore: compare takes two models as arguments; leave out --model z.\n"
    assert fake.configs is None


def test_ctrl_c_ends_with_its_exit_code_and_no_traceback(fake: FakeCompare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    fake.failure = KeyboardInterrupt()
    assert run("compare", "x", "y", "--text", str(tmp_path / "t.txt"), "--json") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_an_error_of_the_comparison_is_one_sentence(fake: FakeCompare, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("some text")
    fake.failure = ConfigError("the tokenizers differ")
    assert run("compare", "x", "y", "--text", str(tmp_path / "t.txt")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("pagedcore: the tokenizers differ\n")
