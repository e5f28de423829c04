"""Models by name, against a hub on this machine: cache, download, revision, tokens, offline, and what is never fetched."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcore.config import EngineConfig
from pagedcore.errors import ModelSourceError
from pagedcore.models.source import resolve_model
from support.stub_hub import StubHub, StubRepo, running_hub

pytest.importorskip("huggingface_hub")

MODEL = {
    "config.json": b'{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"x",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "evil.py": b"raise SystemExit",
    "README.md": b"text",
    "consolidated.safetensors": b"the same weights again",
    "original/params.json": b"{}",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name not in names}


REPOS = {
    "org/model": StubRepo({"main": MODEL, "v2": {**MODEL, "model.safetensors": b"weights two"}}),
    "org/secret": StubRepo({"main": MODEL}, token="letmein"),
    "org/gated": StubRepo({"main": MODEL}, token="letmein", is_gated=True),
    "org/pickled": StubRepo({"main": without(MODEL, "model.safetensors", "consolidated.safetensors")}),
    "org/tokenizer": StubRepo({"main": {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}}),
    "org/empty": StubRepo({"main": {"README.md": b"nothing", "some.json": b"{}"}}),
    "org/sharded": StubRepo(
        {
            "main": {
                "config.json": b"{}",
                "a.safetensors": b"a",
                "b.safetensors": b"b",
                "model.safetensors.index.json": json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode(),
            }
        }
    ),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    with running_hub(REPOS) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def config(tmp_path: Path, model: str = "org/model", **settings: object) -> EngineConfig:
    return EngineConfig(model=model, download_dir=str(tmp_path / "hub"), **settings)  # type: ignore[arg-type]


def test_a_name_is_downloaded_after_saying_so_without_pickles_or_code(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = resolve_model(config(tmp_path))
    assert hub.downloads == WANTED
    assert sorted(path.name for path in resolved.model_dir.iterdir()) == WANTED
    assert (resolved.model_dir / "model.safetensors").read_bytes() == b"weights"
    assert resolved.name == "org/model"
    assert resolved.tokenizer_dir == resolved.model_dir
    assert f"fetching it from {hub.url}" in capsys.readouterr().err


def test_a_complete_cached_model_is_taken_without_asking_the_hub(hub: StubHub, tmp_path: Path) -> None:
    first = resolve_model(config(tmp_path))
    hub.requests.clear()
    assert resolve_model(config(tmp_path)) == first
    assert hub.requests == []


@pytest.mark.parametrize("knows_listing", [True, False])
def test_a_model_of_which_a_part_is_cached_is_completed(hub: StubHub, tmp_path: Path, knows_listing: bool) -> None:
    first = resolve_model(config(tmp_path, "org/sharded"))
    (first.model_dir / "b.safetensors").unlink()
    if not knows_listing:  # as in a cache that an older huggingface_hub has written
        shutil.rmtree(tmp_path / "hub" / "models--org--sharded" / "trees", ignore_errors=True)
    hub.requests.clear()
    assert resolve_model(config(tmp_path, "org/sharded")) == first
    assert (first.model_dir / "b.safetensors").read_bytes() == b"b"


def test_the_revision_is_the_one_that_is_loaded(hub: StubHub, tmp_path: Path) -> None:
    main = resolve_model(config(tmp_path))
    other = resolve_model(config(tmp_path, revision="v2"))
    assert other.model_dir != main.model_dir
    assert (other.model_dir / "model.safetensors").read_bytes() == b"weights two"


def test_an_unknown_revision_is_named(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="no revision 'v9'"):
        resolve_model(config(tmp_path, revision="v9"))


@pytest.mark.parametrize(
    ("model", "words"), [("org/secret", "set HF_TOKEN"), ("org/gated", "accept its terms"), ("org/nowhere", "spelling")]
)
def test_a_refusal_says_what_to_do(hub: StubHub, tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(ModelSourceError, match=words) as error:
        resolve_model(config(tmp_path, model))
    assert model in str(error.value)
    assert hub.url in str(error.value)


@pytest.mark.parametrize("model", ["org/secret", "org/gated"])
def test_the_token_of_the_environment_opens_a_closed_model(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "letmein")
    assert (resolve_model(config(tmp_path, model)).model_dir / "model.safetensors").is_file()


def test_offline_takes_what_is_cached_and_names_what_is_not(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = resolve_model(config(tmp_path))
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(config(tmp_path)) == cached
    with pytest.raises(ModelSourceError, match=r"'org/sharded' is not in the Hugging Face cache.*HF_HUB_OFFLINE"):
        resolve_model(config(tmp_path, "org/sharded"))
    assert hub.requests == []


def test_offline_a_cached_model_that_lacks_only_what_loading_does_not_need_is_taken(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = resolve_model(config(tmp_path))
    (cached.model_dir / "chat_template.jinja").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model(config(tmp_path)) == cached


def test_online_a_file_that_an_interrupted_download_did_not_reach_is_fetched(hub: StubHub, tmp_path: Path) -> None:
    cached = resolve_model(config(tmp_path))
    (cached.model_dir / "chat_template.jinja").unlink()
    assert (resolve_model(config(tmp_path)).model_dir / "chat_template.jinja").read_bytes() == b"x"


def test_offline_a_model_of_which_a_part_is_cached_says_so(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = resolve_model(config(tmp_path, "org/sharded"))
    (cached.model_dir / "b.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelSourceError, match="only in part in the Hugging Face cache"):
        resolve_model(config(tmp_path, "org/sharded"))


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with pytest.raises(ModelSourceError, match="check the network and HF_ENDPOINT") as error:
            resolve_model(config(tmp_path))
    assert url in str(error.value)


def test_a_repository_with_pickles_only_is_refused_and_they_are_not_fetched(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="pickle files are never loaded"):
        resolve_model(config(tmp_path, "org/pickled"))
    assert "pytorch_model.bin" not in hub.downloads


def test_dummy_weights_need_no_weight_files(hub: StubHub, tmp_path: Path) -> None:
    resolved = resolve_model(config(tmp_path, "org/model", load_format="dummy"))
    assert "model.safetensors" not in hub.downloads
    assert (resolved.model_dir / "config.json").is_file()


def test_another_tokenizer_may_come_from_the_hub(hub: StubHub, tmp_path: Path) -> None:
    resolved = resolve_model(config(tmp_path, tokenizer="org/tokenizer"))
    assert resolved.tokenizer_dir != resolved.model_dir
    assert (resolved.tokenizer_dir / "tokenizer.json").is_file()


def test_a_tokenizer_without_files_is_refused(hub: StubHub, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="holds no tokenizer files"):
        resolve_model(config(tmp_path, tokenizer="org/empty"))


@pytest.mark.parametrize("name", ["a--b", "name with spaces", "org/x..y"])
def test_a_name_that_no_hub_can_have_is_refused(hub: StubHub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelSourceError, match="neither a local folder nor a name on the hub"):
        resolve_model(config(tmp_path, name))
    assert hub.requests == []
