"""The BentoML examples with the embedded model: retrieval that the prefix cache helps, and a Bento that is built and served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

import pagedcore
from support.bentoml_served import client_of
from support.repository import ROOT
from support.served import free_port, serve

pytestmark = [pytest.mark.model, pytest.mark.serve, pytest.mark.slow]


def environment(folder: Path) -> dict[str, str]:
    return {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}


def arguments_for(target: str, port: int) -> list[str]:
    return ["-m", "bentoml", "serve", target, "--host", "127.0.0.1", "--port", str(port)]


def test_a_second_question_about_the_same_documents_finds_them_cached(tmp_path: Path) -> None:
    port = free_port()
    with serve(
        arguments_for("examples.bentoml_rag:Rag", port), tmp_path / "rag.log", port=port, ready_path="/readyz", env=environment(tmp_path)
    ) as server:
        with client_of(server.url, timeout=120) as client:
            first = client.ask(question="How long does a book loan last?")
            second = client.ask(question="What does a late book cost?")
        assert httpx.post(server.url + "/ask", json={"query": "?"}, timeout=60).status_code == 400
    assert first["sources"] == second["sources"] == ["loans", "fines"]
    assert "four weeks" in first["text"]
    assert "twenty cents" in second["text"]
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] > 0.6 * second["num_prompt_tokens"]


def run(folder: Path, *arguments: str) -> str:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    env = {**os.environ, **environment(folder.parent), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to build from: the wheel of this version and two services."""
    folder = tmp_path_factory.mktemp("bento") / "context"
    (folder / "examples").mkdir(parents=True)
    for name in ("README.md", "LICENSE", "examples/bentoml_service.py", "deploy/bentofile.yaml"):
        shutil.copy(ROOT / name, folder / name.removeprefix("deploy/"))
    run(folder, "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "wheels", str(ROOT))
    return folder


def build(context: Path, bentofile: str) -> Path:
    """The folder of a new Bento."""
    tag = run(context, "bentoml", "build", "-f", bentofile, "--output", "tag", ".").rpartition("__tag__:")[2]
    folder: Path = context.parent / "bentoml" / "bentos" / tag.replace(":", "/")
    return folder


def test_a_bento_of_the_example_is_built_with_locked_packages_and_answers(context: Path, tmp_path: Path) -> None:
    (context / "own.yaml").write_text(
        yaml.safe_dump({"service": "examples.bentoml_service:svc", "include": ["examples/bentoml_service.py", "wheels/"]}), encoding="utf-8"
    )
    folder = build(context, "own.yaml")
    assert (folder / "src" / "examples" / "bentoml_service.py").exists()
    port = free_port()
    arguments, env = arguments_for(str(folder), port), environment(tmp_path)
    with (
        serve(arguments, tmp_path / "bento.log", port=port, ready_path="/readyz", env=env) as server,
        client_of(server.url, timeout=120) as client,
    ):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in client.chat(messages=messages, max_tokens=20, temperature=0.0)["text"]


def test_the_bentofile_builds_the_service_of_the_environment(context: Path) -> None:
    for name in ("docs/README.md", "docs/LICENSE", "wheelhouse/wheels/other.whl"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("not for the Bento", encoding="utf-8")
    folder = build(context, "bentofile.yaml")
    assert {path.name for path in (folder / "src").iterdir()} == {"README.md", "LICENSE", "wheels", "bentofile.yaml"}
    assert [path.name for path in (folder / "src" / "wheels").iterdir()] == [f"pagedcore-{pagedcore.__version__}-py3-none-any.whl"]
    bento = yaml.safe_load((folder / "bento.yaml").read_text(encoding="utf-8"))
    assert bento["labels"] == {"openai_endpoint": "/v1"}
    assert [env["name"] for env in bento["envs"]] == ["PAGEDCORE_MODEL", "PAGEDCORE_CONFIG"]
    assert bento["services"][0]["config"]["traffic"] == {"timeout": 3600}
    wheel = f"./wheels/pagedcore-{pagedcore.__version__}-py3-none-any.whl"
    lines = (folder / "env" / "python" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("--")]
    assert wheel in pins
    for line in pins:
        assert line == wheel or [specifier.operator for specifier in Requirement(line).specifier] == ["=="], line
    assert {"bentoml", "torch", "llguidance"} <= {Requirement(line).name for line in pins if line != wheel}
    dockerfile = (folder / "env" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "FROM python:3.11" in dockerfile
    assert "COPY --chown=bentoml:bentoml ./src/wheels ./src/wheels" in dockerfile
    assert "PAGEDCORE_MODEL=SmolLM2-135M-Instruct" in dockerfile
    assert dockerfile.rindex("USER bentoml") > dockerfile.rindex("RUN ")
    assert (folder / "src" / wheel).is_file()
