"""A socket's path belongs to one living engine, and only its own user reaches it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcore.errors import ConfigError, EngineUnreachableError
from pagedcore.remote import address
from pagedcore.remote.address import MAX_PATH_BYTES, SocketPath, connect_to, peer_uid
from support.remote_engines import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def test_the_socket_and_a_folder_that_is_made_for_it_are_the_users_alone(folder: Path) -> None:
    claimed = SocketPath(folder / "private" / "engine.sock")
    claimed.listen()
    assert stat.S_IMODE(claimed.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(claimed.path.parent.stat().st_mode) == 0o700
    claimed.close()
    assert not claimed.path.exists()
    claimed.close()


def test_a_path_is_refused_while_an_engine_lives_there_or_loads(folder: Path) -> None:
    claimed = SocketPath(folder / "a.sock")
    with pytest.raises(ConfigError, match=rf"An engine already listens at {folder}/a.sock"):
        SocketPath(folder / "a.sock")
    claimed.listen()
    with pytest.raises(ConfigError, match="already listens"):
        SocketPath(folder / "a.sock")
    claimed.close()
    SocketPath(folder / "a.sock").close()


def test_the_socket_of_an_engine_that_was_killed_is_replaced(folder: Path) -> None:
    code = "import os, sys; from pagedcore.remote.address import SocketPath; SocketPath(sys.argv[1]).listen(); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(folder / "a.sock")], check=False, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == -9
    assert (folder / "a.sock").is_socket()
    with pytest.raises(EngineUnreachableError):
        connect_to(folder / "a.sock")
    claimed = SocketPath(folder / "a.sock")
    claimed.listen()
    connect_to(claimed.path).close()
    claimed.close()


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "a.sock").write_text("mine", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(ConfigError, match="exists and is no socket"):
            SocketPath(folder / "a.sock")
    assert (folder / "a.sock").read_text(encoding="utf-8") == "mine"


def test_a_path_that_no_socket_can_have_is_refused_with_its_length(folder: Path) -> None:
    name = "x" * MAX_PATH_BYTES
    with pytest.raises(ConfigError, match=rf"has {len(str(folder)) + 1 + MAX_PATH_BYTES} bytes, at most {MAX_PATH_BYTES}"):
        SocketPath(folder / name)


def test_a_folder_that_cannot_be_made_is_a_config_error(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        SocketPath(folder / "file" / "a.sock")


def test_a_path_without_an_engine_says_how_to_start_one(folder: Path) -> None:
    with pytest.raises(EngineUnreachableError, match=r"No engine answers at .*pagedcore engine --socket") as caught:
        connect_to(folder / "a.sock")
    assert caught.value.http_status == 503


def test_the_kernel_says_whose_process_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.getuid()


def test_an_engine_of_another_user_is_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = SocketPath(folder / "a.sock")
    claimed.listen()
    monkeypatch.setattr(address, "peer_uid", lambda _: os.getuid() + 1)
    with pytest.raises(EngineUnreachableError, match="another user's"):
        connect_to(claimed.path)
    claimed.close()
