"""Folders that are made once and kept: built beside, moved into place whole, checked against a manifest ever after."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedcore.errors import ModelSourceError
from pagedcore.models.progress import say

CACHE_ENV = "PAGEDCORE_CACHE"
"""Folder for what pagedcore keeps between runs; by default one in the platform's folder of caches."""

MANIFEST_NAME = "pagedcore-manifest.json"
_BUILDING = ".building"


def cache_root() -> Path:
    """`PAGEDCORE_CACHE`, or the platform's cache folder for pagedcore."""
    if os.environ.get(CACHE_ENV):
        return Path(os.environ[CACHE_ENV]).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "pagedcore" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagedcore"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedcore"


def is_whole(folder: Path) -> bool:
    """Every file that the manifest lists is there and has its size."""
    try:
        sizes = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["file_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def ensure_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, calling `build` on an empty folder beside it unless a whole one is there already.

    One process builds at a time, the others wait for it. A build that dies leaves `folder` as it was. A folder that
    is not whole is replaced. Raises `ModelSourceError` when the cache cannot be written, and what `build` raises.
    """
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f"{folder.name}.lock"):
            if not is_whole(folder):
                _build_and_move(folder, build)
    except OSError as error:
        raise ModelSourceError(
            f"The cache folder {folder.parent} cannot be written ({error}); make room or set {CACHE_ENV} to another folder."
        ) from error
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is making {path.stem}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_and_move(folder: Path, build: Callable[[Path], None]) -> None:
    """Under the lock: what an interrupted build left is removed first."""
    workshop = folder.parent / f"{folder.name}{_BUILDING}"
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir()
    try:
        build(workshop)
        _seal(workshop)
        if folder.exists():
            shutil.rmtree(folder)
        workshop.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Write the manifest last, and all of it to the disk."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o644)
        _sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    manifest = folder / MANIFEST_NAME
    manifest.write_text(json.dumps({"file_bytes": sizes}, indent=2) + "\n", encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def _sync(path: Path) -> None:
    if path.is_dir() and sys.platform == "win32":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDWR if path.is_file() and sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
