"""Code in the pages and the examples runs as it stands."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.markdown import Block, blocks, pages
from support.played_page import play
from support.repository import ROOT, python_files

PYTHON_BLOCKS = [block for page in pages() for block in blocks(page, "python")]
ENGLISH_BLOCKS = [block for block in PYTHON_BLOCKS if "zh-CN" not in block.page.parts]
"""Those in Chinese are the same, which test_quick_starts.py holds."""
QUICK_STARTS = sorted((ROOT / "docs" / "quickstart").glob("*.md"))
"""Run by test_quick_starts.py."""
PAGES_WITH_OUTPUT = sorted({b.page for b in ENGLISH_BLOCKS if b.need in ("model", "client")} - {ROOT / "README.md", *QUICK_STARTS})
NEEDS = {"model", "litserve", "bentoml", "file", "client"}
EXAMPLES = python_files(ROOT / "examples")
CELLS = "# %%"
PRELUDES = {
    "litserve": "from pagedcore_adapters import litserve_api as _a; _a.PagedServer.run = lambda self, **o: print('served on', o['port'])\n",
}
START_TIMEOUT_S = 240


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))}


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_block(block: Block, folder: Path) -> str:
    script = folder / "block.py"
    script.write_text(PRELUDES.get(block.need or "", "") + block.text, encoding="utf-8")
    return run_python(str(script))


def block_of(need: str, containing: str) -> Block:
    """The one such block of the README."""
    (found,) = [block for block in blocks(ROOT / "README.md", "python") if block.need == need and containing in block.text]
    return found


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.id)
def test_each_python_block_parses_and_says_what_it_needs(block: Block) -> None:
    ast.parse(block.text)
    assert block.need in NEEDS


@pytest.mark.model
@pytest.mark.slow
def test_the_library_block_says_paris_and_then_hits_the_cache(tmp_path: Path) -> None:
    shown = run_block(block_of("model", "with LLM("), tmp_path).splitlines()
    assert shown[0] == "The capital of France is Paris."
    assert shown[1] == "32 of 37 prompt tokens came from the prefix cache"
    assert shown[2] == "prefix hit rate: 0.43"


@pytest.mark.model
@pytest.mark.slow
def test_the_async_block_streams(tmp_path: Path) -> None:
    assert run_block(block_of("model", "AsyncEngine(EngineConfig())"), tmp_path).strip()


@pytest.mark.model
@pytest.mark.slow
def test_the_langchain_block_answers_each_input(tmp_path: Path) -> None:
    first, second = run_block(block_of("model", "ChatPagedCore("), tmp_path).splitlines()
    assert "Paris" in first
    assert "Tokyo" in second


def test_the_litserve_block_builds_a_server_and_runs_it(tmp_path: Path) -> None:
    assert run_block(block_of("litserve", "build_server"), tmp_path) == "served on 8000\n"


def test_the_bentoml_block_builds_a_service(tmp_path: Path) -> None:
    run_block(block_of("bentoml", "build_service"), tmp_path)


@pytest.mark.model
@pytest.mark.serve
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_OUTPUT, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    assert play(page, tmp_path)


def test_each_block_that_takes_something_is_run_by_a_test() -> None:
    run = {ROOT / "README.md", *PAGES_WITH_OUTPUT, *QUICK_STARTS}
    assert {block.page for block in ENGLISH_BLOCKS if block.need} == run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_is_documented_and_guarded(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if text.startswith(CELLS):  # a notebook as a script: its cells run in order
        return
    assert ast.get_docstring(tree)
    assert all(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant) for node in tree.body), (
        "it does something when imported"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_example_is_named_by_a_test(path: Path) -> None:
    names = (path.name, f"examples.{path.stem}")
    assert any(name in test.read_text(encoding="utf-8") for test in python_files(ROOT / "tests") for name in names)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("offline.py", "Paris"),
        ("async_stream.py", "red"),
        ("langchain_chain.py", "Paris"),
        ("langchain_agent.py", "Packed: "),
        ("langchain_rag.py", "64 of 91 prompt tokens came from the cache"),
        ("quick_look.py", "Block size 8 would gain 6 points"),
        ("migrate_from_vllm.py", "'The capital of Japan is' -> ' Tokyo.' (stop)"),
    ],
)
def test_an_example_runs_as_it_is(name: str, expected: str) -> None:
    assert expected in run_python(str(ROOT / "examples" / name))


def test_the_script_for_vllm_differs_in_its_import_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "migrate_from_vllm.py").read_text(encoding="utf-8"))
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports == ["from __future__ import annotations", "import sys", "from pagedcore import LLM, SamplingParams"]
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    assert called == {"generate", "chat"}


@pytest.mark.model
@pytest.mark.serve
@pytest.mark.slow
def test_the_server_example_answers_the_client_example() -> None:
    with running_server() as base_url:
        assert "Paris" in run_python(str(ROOT / "examples" / "openai_client.py"), f"{base_url}/v1")


@contextmanager
def running_server() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "litserve_server.py"), str(port)]
    server = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/ready", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended while it started"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"{url} was not ready after {START_TIMEOUT_S} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
