"""The quick starts work as they are written, say the same numbers, and are the same in both languages."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.markdown import blocks
from support.played_page import play
from support.repository import ROOT

ENGLISH = ROOT / "docs"
CHINESE = ROOT / "docs" / "zh-CN"
PAGES = sorted((ENGLISH / "quickstart").glob("*.md"))
IN_PROCESS = {"library.md", "langchain.md"}
TRANSLATED = sorted(path.relative_to(CHINESE) for path in CHINESE.rglob("*.md"))
HITS = ["0 of 61", "48 of 61", "48 of 61"]
CACHED = re.compile(r"\d+ of \d+")
RATE = re.compile(r"0\.52\d+")


def marked(page: Path) -> object:
    marks = [pytest.mark.model, pytest.mark.slow, *([] if page.name in IN_PROCESS else [pytest.mark.serve])]
    return pytest.param(page, id=page.stem, marks=marks)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_a_page_played_from_top_to_bottom_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the pages' commands need curl")
    printed = "".join(play(page, tmp_path))
    assert CACHED.findall(printed) == HITS
    assert [round(float(rate), 4) for rate in RATE.findall(printed)] == [0.5246]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_says_what_its_blocks_take_and_ends_with_the_hit_numbers(page: Path) -> None:
    runnable = [block for block in blocks(page) if block.language in ("python", "bash")]
    unneeded = [block for block in runnable if block.need not in ("model", "serve", "client", "file")]
    assert all(line.startswith("pip install ") for block in unneeded for line in block.text.splitlines())
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## \d\. (.*)$", text, re.MULTILINE)[-1] == "Look at the cache hit numbers"
    shown = "".join(block.text for block in blocks(page, "text"))
    assert CACHED.findall(shown) == HITS


def test_there_is_a_page_for_each_way_in() -> None:
    assert {page.stem for page in PAGES} == {"library", "server", "litserve", "bentoml", "langchain"}
    assert {page.name for page in PAGES} <= {path.name for path in TRANSLATED if path.parts[0] == "quickstart"}


@pytest.mark.parametrize("name", TRANSLATED, ids=str)
def test_code_is_the_same_in_both_languages(name: Path) -> None:
    english, chinese = blocks(ENGLISH / name), blocks(CHINESE / name)
    assert [(b.language, b.title, b.need, b.text) for b in chinese] == [(b.language, b.title, b.need, b.text) for b in english]
