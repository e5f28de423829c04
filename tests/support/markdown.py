"""The documentation as data: pages, code blocks, links and names of files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.repository import ROOT

BLOCK = re.compile(r"(?:<!-- test: (?P<need>\w+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `need` is what the comment above it says that it takes to run."""

    page: Path
    line: int
    language: str
    text: str
    need: str | None

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that we write."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[Block]:
    """Its fenced blocks of one language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start("text")), language, match["text"], match["need"])
        for match in BLOCK.finditer(text)
        if match["language"] == language
    ]


def links(page: Path) -> list[str]:
    """Targets of its links into the repository."""
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [target.split("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


def spans(page: Path) -> list[str]:
    """Text in single backticks, outside fenced blocks."""
    return SPAN.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
