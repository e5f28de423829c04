"""The site is built without a warning, shows each page and each public name, and needs no network."""

from __future__ import annotations

import functools
import http.server
import importlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pagedcore
from support.browser import open_browser
from support.repository import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
OTHER_NAMES = {"AsyncLLMEngine", "PagedCoreService", "__version__"}
"""Public names without a section: another name of a class, what a function of ours makes, a text."""
ADAPTERS = ("litserve_api", "bentoml_service", "langchain_chat", "langchain_llm", "shared_engine")
LOOKED_AT = ("", "quickstart/server/", "migration/vllm/", "metrics/", "reference/library/", "zh-CN/migration/vllm/")
WIDTHS = (1280, 390)


def sections() -> set[str]:
    """Everything that a reference page is generated for."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def test_each_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"([\w./-]+\.md)$", SETTINGS[SETTINGS.index("\nnav:") :], re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(named) == sorted(page for page in pages if not page.startswith("decisions/0"))


def test_each_decision_is_in_their_list() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (DOCS / "decisions").glob("0*.md") if f"({page.name})" not in listed]


def test_each_public_name_has_a_section() -> None:
    assert {f"pagedcore.{name}" for name in pagedcore.__all__ if name not in OTHER_NAMES} <= sections()


@pytest.mark.parametrize("module", ADAPTERS)
def test_each_public_name_of_an_adapter_has_a_section(module: str) -> None:
    home = importlib.import_module(f"pagedcore_adapters.{module}")
    own = {name for name, value in vars(home).items() if getattr(value, "__module__", "") == home.__name__ and not name.startswith("_")}
    named = {name: getattr(home, name) for name in getattr(home, "__all__", own)}
    public = {name for name, value in named.items() if callable(value)} - OTHER_NAMES
    assert public
    text = (REFERENCE / "adapters.md").read_text(encoding="utf-8")
    assert not {name for name in public if f".{name}\n" not in text}


def test_no_adapter_is_forgotten() -> None:
    assert {path.stem for path in (ROOT / "adapters" / "pagedcore_adapters").glob("[!_]*.py")} == set(ADAPTERS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_page_is_built(site: Path) -> None:
    pages = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]
    missing = [page for page in pages if not (site / _folder(page) / "index.html").is_file()]
    assert not missing


def test_each_section_of_the_reference_is_built(site: Path) -> None:
    html = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").rglob("index.html"))
    assert {name for name in sections() if f'id="{name}"' not in html} <= {"pagedcore.errors"}
    assert 'id="pagedcore.LLM.generate"' in html
    assert 'id="pagedcore.CacheReport.live_tokens"' in html


@pytest.mark.slow
def test_pages_fit_the_window_and_fetch_nothing_from_elsewhere(site: Path) -> None:
    with served(site) as url, open_browser() as browser:
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": 900})
            fetched: list[str] = []
            failed: list[str] = []
            page.on("request", lambda request, fetched=fetched: fetched.append(request.url))
            page.on("response", lambda reply, failed=failed: failed.append(reply.url) if reply.status >= 400 else None)
            for name in LOOKED_AT:
                page.goto(url + name, wait_until="networkidle")
                overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert overflow == 0, (name, width)
            assert not failed
            assert not [one for one in fetched if not one.startswith((url, "data:", "blob:"))]
            page.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def _folder(page: Path) -> Path:
    return page.parent if page.name in ("index", "README") else page
