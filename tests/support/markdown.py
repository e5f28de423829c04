"""The documentation as data: pages, code blocks, links and names of files."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

BLOCK = re.compile(
    r'(?:<!-- test: (?P<need>\w+) -->\n)?```(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?\n(?P<text>.*?)^```', re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `need` is what the comment above it says that it takes to run, `title` the file that it is."""

    page: Path
    line: int
    language: str
    text: str
    need: str | None
    title: str | None = None

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def pages() -> tuple[Path, ...]:
    """Every page that we write."""
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Its fenced blocks, of one language or of all."""
    return [block for block in _all_blocks(page) if language in (None, block.language)]


@functools.cache
def _all_blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    return tuple(
        Block(page, text.count("\n", 0, match.start("text")), match["language"], match["text"], match["need"], match["title"])
        for match in BLOCK.finditer(text)
    )


def links(page: Path) -> list[str]:
    """Targets of its links into the repository."""
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [target.split("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


def spans(page: Path, without: re.Pattern[str] | None = None) -> list[str]:
    """Text in single backticks, outside fenced blocks and outside what `without` matches."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return SPAN.findall(text if without is None else without.sub("", text))


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of the table under each heading, cell by cell, without its head."""
    found = {}
    for section in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in section.splitlines() if line.startswith("|")]
        if rows:
            found[section.splitlines()[0]] = rows[2:]
    return found
