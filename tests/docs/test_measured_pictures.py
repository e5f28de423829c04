"""A picture of measurements is drawn from results that stand in the repository and say where they were measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from pagedcore.commands.bench.results import read_results
from support.markdown import blocks, links
from support.repository import ROOT

PAGE = ROOT / "docs" / "performance.md"
PICTURE = re.compile(r"images/h200-[\w-]+\.svg")
NEEDED_FACTS = ("device", "commit", "date", "pagedcore", "torch", "model", "dtype", "hidden_size")


def drawings() -> list[tuple[list[Path], Path]]:
    """Results and picture of each `pagedcore bench plot` that the page shows."""
    lines = [line for block in blocks(PAGE, "bash") for line in block.text.splitlines() if line.startswith("pagedcore bench plot ")]
    found = []
    for words in map(shlex.split, lines):
        place = words.index("-o")
        found.append(([ROOT / name for name in words[3:place]], ROOT / words[place + 1]))
    return found


def test_a_picture_shows_results_that_name_card_commit_versions_and_shape() -> None:
    for files, picture in drawings():
        drawn = picture.read_text(encoding="utf-8")
        for run in map(read_results, files):
            assert all(run.facts.get(name) for name in NEEDED_FACTS), run.facts
            assert all(str(run.facts[name]) in drawn for name in ("device", "model"))
            assert run.label in drawn or len(files) == 1


def test_each_measured_picture_of_the_page_says_how_it_was_drawn() -> None:
    shown = {target for target in links(PAGE) if PICTURE.fullmatch(target)}
    assert shown == {str(picture.relative_to(PAGE.parent)) for _, picture in drawings()}


def test_each_file_of_results_is_drawn() -> None:
    drawn = {file for files, _ in drawings() for file in files}
    assert set((ROOT / "bench" / "results").glob("*.json")) == drawn
