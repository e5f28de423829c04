"""What the settings `model` and `tokenizer` may name, and what is said when they name something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore.config import EngineConfig
from pagedcore.errors import CheckpointError, ConfigError, ModelSourceError
from pagedcore.models.source import resolve_model


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    resolved = resolve_model(EngineConfig(model=str(folder)))
    assert (resolved.model_dir, resolved.tokenizer_dir, resolved.name) == (folder, folder, str(folder))


def test_a_relative_folder_goes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "org" / "model", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(EngineConfig(model="org/model")).model_dir.resolve() == tmp_path / "org" / "model"


def test_another_local_tokenizer_is_taken(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    other = make_folder(tmp_path / "t", "tokenizer.json")
    assert resolve_model(EngineConfig(model=str(folder), tokenizer=str(other))).tokenizer_dir == other


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing", "a/b/c", "C:\\models\\x"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ModelSourceError, match="no such folder"):
        resolve_model(EngineConfig(model=name))


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match="pass the folder"):
        resolve_model(EngineConfig(model=str(file)))


def test_a_folder_without_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"lacks config\.json"):
        resolve_model(EngineConfig(model=str(make_folder(tmp_path / "m", "model.safetensors"))))


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "pytorch_model.bin")
    with pytest.raises(ModelSourceError, match=r"pytorch_model\.bin.*never loaded"):
        resolve_model(EngineConfig(model=str(folder)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"lacks b\.safetensors"):
        resolve_model(EngineConfig(model=str(folder)))


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "a.safetensors")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json must hold a JSON object"):
        resolve_model(EngineConfig(model=str(folder)))


def test_dummy_weights_need_a_configuration_only(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json")
    assert resolve_model(EngineConfig(model=str(folder), load_format="dummy")).model_dir == folder


def test_a_revision_of_a_folder_is_refused_but_for_the_default_branch(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve_model(EngineConfig(model=str(folder), revision="main")).model_dir == folder
    with pytest.raises(ConfigError, match="revision is 'v2'"):
        resolve_model(EngineConfig(model=str(folder), revision="v2"))
