"""The commands end to end, with a scripted engine where there would be a model."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagedcore import cli
from pagedcore.config import EngineConfig
from pagedcore.console.indicators import Targets
from pagedcore.errors import ConfigError, PoolTooSmallError, StepFailedError
from pagedcore.openai.settings import ServerSettings
from pagedcore.sampling_params import SamplingParams
from support.scripted_engine import ScriptedEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    scripted = ScriptedEngine()

    def build(config: EngineConfig) -> ScriptedEngine:
        scripted.config = config
        return scripted

    module = ModuleType("pagedcore.async_engine")
    module.AsyncEngine = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pagedcore.async_engine", module)
    return scripted


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    import pagedcore

    assert capsys.readouterr().out == f"pagedcore {pagedcore.__version__}\n"


def test_help_lists_the_commands_and_each_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    overview = capsys.readouterr().out
    for command in ("serve", "chat", "generate", "bench", "compare", "doctor", "status"):
        assert f"\n  {command} " in overview
        assert run(command, "--help") == 0
        assert "Usage: pagedcore " + command in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "bench throughput", "bench latency", "bench prefix", "bench serve"])
def test_every_engine_setting_is_a_flag_of(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    shown = capsys.readouterr().out
    for field in EngineConfig.__dataclass_fields__:
        assert f"--{field.replace('_', '-')} " in shown, field


def test_a_wrong_setting_ends_with_one_sentence_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi", "--block-size", "7") == 2
    assert capsys.readouterr().err == "pagedcore: block_size is 7 and must be one of 8, 16, 32, 64, 128, 256.\n"


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--modle", "x") == 2
    assert "--model" in capsys.readouterr().err


def test_generate_prints_the_text_and_a_cache_line(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.num_cached_tokens = 16
    assert run("generate", "What is the capital of France?", "--max-tokens", "9") == 0
    out, err = capsys.readouterr()
    assert out == "Paris\n"
    assert err == ("cache: 16 of 36 prompt tokens (missed blocks: 2 cold) | 2 tokens generated in 0.50 s, the first after 250 ms\n")
    assert engine.asked == [("user:What is the capital of France?\n", SamplingParams(temperature=0.0, max_tokens=9), False)]
    assert engine.is_closed


def test_generate_raw_leaves_the_template_out(engine: ScriptedEngine) -> None:
    assert run("generate", "Once", "--raw", "--model", "m") == 0
    assert engine.asked == [("Once", SamplingParams(temperature=0.0, max_tokens=256), True)]
    assert engine.config == EngineConfig(model="m")


def test_generate_closes_the_engine_and_ends_with_code_2_when_the_request_is_refused(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.error = PoolTooSmallError("too small")
    assert run("generate", "x") == 2
    assert capsys.readouterr().err == "pagedcore: too small\n"
    assert engine.is_closed


def test_generate_ends_with_code_1_when_the_engine_fails(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.failure = StepFailedError("step 3 failed")
    assert run("generate", "x") == 1
    assert capsys.readouterr().err.startswith("pagedcore: step 3 failed")


def test_chat_reads_until_the_end_of_the_input(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["hello"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert run("chat", "some-model", "--system", "Be brief.") == 0
    assert "Paris\n" in capsys.readouterr().out
    assert engine.asked[0][0] == "system:Be brief.\nuser:hello\n"
    assert engine.config.model == "some-model"
    assert engine.is_closed


class FakeServer:
    """Records how it was built and run."""

    def __init__(self) -> None:
        self.built: tuple[EngineConfig, dict[str, Any]] | None = None
        self.ran: dict[str, Any] = {}
        self.failure: Exception | None = None

    def build(self, config: EngineConfig, **options: Any) -> FakeServer:
        self.built = (config, options)
        return self

    def run(self, *, on_ready: Callable[[], None], **options: Any) -> None:
        self.ran = options
        if self.failure is not None:
            raise self.failure
        on_ready()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setitem(sys.modules, "pagedcore_adapters.litserve_api", SimpleNamespace(build_server=fake.build))
    return fake


def test_serve_builds_the_litserve_server_and_says_how_to_talk_to_it(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-num-seqs", "4", "--drain-timeout-s", "7", "--warmup-file", "w.json")
    assert run("serve", "--port", "8123", "--api-key", "s3cret", *options) == 0
    assert server.built is not None
    config, given = server.built
    assert config == EngineConfig(max_num_seqs=4)
    assert given["settings"].api_keys == ("s3cret",)
    assert given["warmup_file"] == Path("w.json")
    assert given["drain_timeout_s"] == 7.0
    assert server.ran == {"host": "127.0.0.1", "port": 8123}
    out = capsys.readouterr().out
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in out
    assert '"model": "SmolLM2-135M-Instruct"' in out
    assert "s3cret" not in out


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["some/model"], "some/model"), (["--model", "m", "--served-model-name", "first", "--served-model-name", "second"], "first")],
)
def test_serve_names_the_model_that_clients_may_use(
    server: FakeServer, arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", *arguments) == 0
    assert f"pagedcore serves {name} at http://127.0.0.1:8000/v1" in capsys.readouterr().out


def test_serve_says_how_to_talk_to_it_only_once_it_serves(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.failure = ConfigError("port 8000 of 127.0.0.1 cannot be used: Address already in use; choose another port.")
    assert run("serve") == 2
    out, err = capsys.readouterr()
    assert out == "pagedcore loads SmolLM2-135M-Instruct ...\n"
    assert err == f"pagedcore: {server.failure}\n"


def test_two_different_models_are_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "a", "--model", "b") == 2
    assert "'a'" in capsys.readouterr().err
    assert server.built is None


def test_the_api_key_may_come_from_the_environment(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDCORE_API_KEY", "from-env")
    assert run("serve") == 0
    assert server.built is not None
    assert server.built[1]["settings"].api_keys == ("from-env",)


def test_tenants_have_keys_of_their_own_and_fields_may_be_ignored(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("serve", "--tenant-key", "blue=b1", "--tenant-key", "red=r=1", "--ignore-field", "store") == 0
    assert server.built is not None
    settings = server.built[1]["settings"]
    assert (settings.tenants, settings.ignored_fields) == ({"b1": "blue", "r=1": "red"}, ("store",))
    monkeypatch.setenv("PAGEDCORE_TENANT_KEYS", "blue=b1 red=r1")
    assert run("serve") == 0
    assert server.built[1]["settings"].tenants == {"b1": "blue", "r1": "red"}
    assert run("serve", "--tenant-key", "blue") == 2


PAGE = "https://page.example"


def test_pages_of_other_origins_may_be_let_in(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve") == 0
    assert server.built is not None
    assert server.built[1]["settings"].cors_origins == ()
    assert run("serve", "--cors-origin", PAGE, "--cors-origin", "http://localhost:3000") == 0
    assert server.built[1]["settings"].cors_origins == (PAGE, "http://localhost:3000")
    monkeypatch.setenv("PAGEDCORE_CORS_ORIGINS", f"{PAGE} http://localhost:3000")
    assert run("serve") == 0
    assert server.built[1]["settings"].cors_origins == (PAGE, "http://localhost:3000")
    assert run("serve", "--cors-origin", PAGE + "/") == 2
    assert "cors_origins holds 'https://page.example/'; an origin is scheme://host" in capsys.readouterr().err


@pytest.mark.needs_torch
def test_fronts_of_our_own_get_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcore.commands.http_front import FrontPlan

    plans: list[FrontPlan] = []
    monkeypatch.setattr("pagedcore.commands.serving.attach_fronts", lambda plan, num_fronts, say: plans.append(plan))
    keys = ("--api-key", "open", "--tenant-key", "blue=b1", "--ignore-field", "store", "--target", "blocked=3", "--cors-origin", PAGE)
    assert run("serve", "--socket", "/run/e.sock", "--fronts", "2", *keys, "--drain-timeout-s", "7") == 0
    settings = ServerSettings(
        api_keys=("open",), tenants={"b1": "blue"}, ignored_fields=("store",), targets=Targets(blocked=3), cors_origins=(PAGE,)
    )
    plan = FrontPlan(engine_socket="/run/e.sock", host="127.0.0.1", port=8000, settings=settings, drain_timeout_s=7.0)
    assert plans == [plan]
    assert msgspec.json.decode(msgspec.json.encode(plan), type=FrontPlan) == plan, "a process of its own reads the same"


@pytest.mark.needs_torch
@pytest.mark.parametrize(("options", "drain_timeout_s"), [((), 30.0), (("--drain-timeout-s", "0"), 0.0)])
def test_the_engine_alone_takes_the_same_time_to_drain(
    options: tuple[str, ...], drain_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Any, ...]] = []
    monkeypatch.setattr("pagedcore.commands.engine_process.serve_engine", lambda *given: served.append(given))
    assert run("engine", "--socket", "/run/e.sock", *options) == 0
    assert served == [(EngineConfig(), Path("/run/e.sock"), drain_timeout_s, None)]


def test_the_targets_of_the_live_page_may_be_set(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--target", "hit_rate=0.6", "--target", "blocked=3") == 0
    assert server.built is not None
    assert server.built[1]["settings"].targets == Targets(hit_rate=0.6, blocked=3)
    assert run("serve", "--target", "speed=9") == 2
    assert "The names are: device_busy" in capsys.readouterr().err


def test_the_form_of_tool_calls_may_be_forced(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--tool-parser", "llama3") == 0
    assert server.built is not None
    assert server.built[1]["settings"].tool_parser == "llama3"
    assert run("serve", "--tool-parser", "qwen") == 2
    assert "tool_parser is 'qwen' and must be one of auto, hermes, llama3, mistral." in capsys.readouterr().err


@pytest.mark.needs_torch
def test_doctor_prints_the_same_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["packages"]["torch"] == importlib.metadata.version("torch")
    assert report["recommendations"][0]["block_size"] == 16
    assert run("doctor") == 0
    shown = capsys.readouterr().out
    assert importlib.metadata.version("torch") in shown
    assert "triton-w4a16" in shown
    assert f"--max-num-seqs {report['recommendations'][0]['max_num_seqs']}" in shown


@pytest.mark.needs_torch
def test_doctor_refuses_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--model", str(tmp_path)) == 1
    assert "config.json" in capsys.readouterr().err


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pagedcore", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("pagedcore", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("pagedcore ")
