"""Folders made once: whole or not there, whatever interrupts the making and whoever else makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedcore.errors import ModelSourceError
from pagedcore.models.cache_folder import CACHE_ENV, MANIFEST_NAME, cache_root, ensure_folder, is_whole

BUILD_AND_WAIT = """
import sys
from pathlib import Path
from pagedcore.models.cache_folder import ensure_folder

def build(workshop):
    (workshop / "half").write_text("half")
    print("building", flush=True)
    sys.stdin.readline()
    (workshop / "whole").write_text("from the child")

ensure_folder(Path(sys.argv[1]), build)
print("done", flush=True)
"""


def write_files(workshop: Path) -> None:
    (workshop / "sub").mkdir()
    (workshop / "a.bin").write_bytes(b"12345")
    (workshop / "sub" / "b.txt").write_text("b")


def must_not_build(workshop: Path) -> None:
    raise AssertionError(f"built {workshop} again")


def start_child(folder: Path) -> subprocess.Popen[str]:
    """A process that has begun to build and waits for a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_WAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "building\n"
    return child


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"
    assert ensure_folder(folder, write_files) == folder
    assert (folder / "a.bin").read_bytes() == b"12345"
    assert ensure_folder(folder, must_not_build) == folder


def test_the_manifest_names_every_file_and_its_size(tmp_path: Path) -> None:
    folder = ensure_folder(tmp_path / "model", write_files)
    assert json.loads((folder / MANIFEST_NAME).read_text()) == {"file_bytes": {"a.bin": 5, "sub/b.txt": 1}}


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    def private(workshop: Path) -> None:
        (workshop / "a").touch(mode=0o600)

    folder = ensure_folder(tmp_path / "model", private)
    assert (folder / "a").stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("damage", ["missing", "size", "no_manifest", "bad_manifest", "odd_manifest", "empty"])
def test_a_folder_that_is_not_whole_is_built_again(tmp_path: Path, damage: str) -> None:
    folder = ensure_folder(tmp_path / "model", write_files)
    if damage in ("missing", "empty"):
        (folder / "a.bin").unlink()
    if damage == "size":
        (folder / "a.bin").write_bytes(b"1234")
    if damage in ("no_manifest", "empty"):
        (folder / MANIFEST_NAME).unlink()
    if damage == "bad_manifest":
        (folder / MANIFEST_NAME).write_text("{")
    if damage == "odd_manifest":
        (folder / MANIFEST_NAME).write_text("[]")
    (folder / "stale").write_text("of the damaged one")
    assert not is_whole(folder)
    ensure_folder(folder, write_files)
    assert is_whole(folder)
    assert not (folder / "stale").exists()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(workshop: Path) -> None:
        write_files(workshop)
        raise ModelSourceError("no network")

    with pytest.raises(ModelSourceError, match="no network"):
        ensure_folder(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    ensure_folder(tmp_path / "model", write_files)


def test_a_killed_build_leaves_no_half_folder_and_the_next_one_works(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    child = start_child(folder)
    child.kill()
    child.communicate()
    assert not folder.exists()
    ensure_folder(folder, write_files)
    assert sorted(path.name for path in folder.iterdir()) == ["a.bin", MANIFEST_NAME, "sub"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_a_second_process_waits_for_the_first_and_takes_what_it_built(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first = start_child(folder)
    second = subprocess.Popen(
        [sys.executable, "-c", BUILD_AND_WAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert first.communicate("go\n")[0] == "done\n"
    assert second.communicate("go\n")[0] == "done\n"  # no "building"
    assert (folder / "whole").read_text() == "from the child"


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root and Windows may write everywhere")
def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ModelSourceError, match=CACHE_ENV):
        ensure_folder(tmp_path / "cache" / "model", write_files)


def test_a_cache_path_that_is_a_file_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelSourceError, match=CACHE_ENV):
        ensure_folder(tmp_path / "file" / "model", write_files)


def test_the_environment_variable_names_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    assert cache_root() == tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG folder is Linux's")
def test_the_default_cache_is_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "pagedcore"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "pagedcore"
