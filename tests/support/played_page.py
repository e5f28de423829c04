"""A quick-start page played from top to bottom, as its reader would: files written, the server started, scripts and commands run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from support.markdown import Block, blocks
from support.repository import ROOT
from support.served import free_port, serve

PAGES_PORT = "8000"
"""The port that the pages name; a free one is put in its place."""
READY_PATHS = {"serve": "/ready", "engine": None}
"""What a block starts -> where it says that it is ready; to an engine at a socket its clients wait."""
AS_MODULE = {"pagedcore": ["-m", "pagedcore"], "bentoml": ["-m", "bentoml"], "python": []}
"""First word of a command that serves -> what Python runs in its place."""


def play(page: Path, folder: Path) -> list[str]:
    """What the page's scripts and commands print, in their order, each compared with the `text` block that follows it."""
    port = free_port()
    printed = []
    with ExitStack() as stack:
        for block, expected in _steps(page):
            text = block.text.replace(PAGES_PORT, str(port))
            if block.title is not None:
                (folder / block.title).write_text(text, encoding="utf-8")
            if block.need in READY_PATHS:
                log, ready_path = folder / f"{block.need}.log", READY_PATHS[block.need]
                stack.enter_context(serve(_arguments(text), log, port=port, ready_path=ready_path, env=_environment(folder)))
            elif block.need in ("model", "client"):
                printed.append(_run(block, text, folder))
                assert expected is None or printed[-1] == expected, block.id
    return printed


def _steps(page: Path) -> list[tuple[Block, str | None]]:
    """Each block that takes something to run, and the text that it must print, if the page says."""
    both = pairwise([*blocks(page), Block(page, 0, "", "", None)])
    return [(block, after.text if after.language == "text" else None) for block, after in both if block.need is not None]


def _arguments(command: str) -> list[str]:
    program, *arguments = shlex.split(command)
    return [*AS_MODULE[program], *arguments]


def _run(block: Block, text: str, folder: Path) -> str:
    command = [sys.executable, str(folder / (block.title or ""))] if block.language == "python" else ["bash", "-c", text]
    done = subprocess.run(command, env=_environment(folder), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.id}\n{done.stderr}"
    return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "adapters"))
    return {**os.environ, "PYTHONPATH": paths, "BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
