"""Pages name only what exists: files, commands, settings."""

from __future__ import annotations

import functools
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from pagedcore.cli import app
from pagedcore.config import EngineConfig
from support.markdown import blocks, links, pages, spans
from support.repository import ROOT

PATH_LIKE = re.compile(r"^[\w.-]+(?:/[\w.-]+)*/?$")
ROOTS = ("pagedcore/", "kernels/", "adapters/", "tests/", "docs/", "deploy/", "bench/", "examples/", ".ci/")
FILE_NAME = re.compile(r"^[\w-]+\.(?:py|md|toml|yaml)$")
FILES_OF_USERS = {"server.py", "config.json", "tokenizer.json", "index.md"}
NAME_ELSEWHERE = re.compile(r"^\|[^|]*\|", re.MULTILINE)
"""First column of the tables in docs/migration: what another engine calls it."""
MAKE = re.compile(r"^make ([a-z][a-z-]*)", re.MULTILINE)
COMMAND = re.compile(r"^pagedcore ([a-z]+)", re.MULTILINE)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_code(page: Path) -> str:
    without = NAME_ELSEWHERE if page.parent.name == "migration" else None
    return "\n".join([*spans(page, without=without), *(block.text for block in blocks(page, "bash"))])


@functools.cache
def file_names() -> set[str]:
    """Of every file that there is, and of those that users have."""
    return {path.name for root in ROOTS for path in (ROOT / root).rglob("*")} | {path.name for path in ROOT.iterdir()} | FILES_OF_USERS


@functools.cache
def flags_of_commands() -> set[str]:
    """Every flag of `pagedcore` and of all that stands below it."""
    parameters = [parameter for command in commands_of(get_command(app)) for parameter in command.params]
    return {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}


def commands_of(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands_of(below)


@functools.cache
def scripts() -> str:
    """Makefile, benchmarks and examples, which have flags of their own."""
    paths = [ROOT / "Makefile", *(path for folder in ("bench", "examples") for path in sorted((ROOT / folder).rglob("*.py")))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_named_files_exist(page: Path) -> None:
    names = [span for span in spans(page) if PATH_LIKE.match(span)]
    missing = [name for name in names if name.startswith(ROOTS) and not (ROOT / name).exists()]
    missing += [name for name in names if FILE_NAME.match(name) and name not in file_names()]
    assert not missing


def test_the_named_files_are_looked_for() -> None:
    assert sum(span.startswith(ROOTS) for page in pages() for span in spans(page)) > 20


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_named_commands_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert set(MAKE.findall(all_code(page))) <= targets
    commands = {info.name or info.callback.__name__ for info in app.registered_commands if info.callback}
    commands |= {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    assert set(COMMAND.findall(all_code(page))) <= commands


@pytest.mark.parametrize("flag", sorted({flag for page in pages() for flag in re.findall(r"--[a-z][a-z-]+", all_code(page))}))
def test_named_flags_exist(flag: str) -> None:
    assert flag in flags_of_commands() or flag in scripts()


def test_reference_pages_are_what_the_code_says() -> None:
    generate = _load(ROOT / "docs" / "generate.py")
    for name, page in generate.PAGES.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), f"docs/{name} is old; run: make docs-update"


def test_the_readmes_settings_have_the_true_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows
    config = EngineConfig()
    for name, default in rows:
        assert str(getattr(config, name)).lower() == default.strip().lower(), name


def test_the_readmes_extras_are_the_projects() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"`(?:pip install )?(?:'\.)?\[(\w+)\]'?`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(named) == {"litserve", "bentoml", "langchain", "grammar", "otel", "plot", "all"}
    assert set(named) <= set(extras)


def test_contributing_is_two_pages_at_most() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_what_was_not_built_here_says_so() -> None:
    assert (ROOT / "deploy" / "bentofile.yaml").read_text(encoding="utf-8").startswith("# Not built here")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
