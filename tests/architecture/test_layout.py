"""Where files are, and how large they may grow."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.repository import PACKAGE_FOLDERS, ROOT, code_lines, imported_modules, package_files, python_files

PACKAGE = ROOT / "pagedcore"
FOLDER_BUDGETS = {"core": 1500, "runtime": 2000, "observe": 1200, "openai": 900}
MODEL_FILE_BUDGET = 250
ADAPTER_FILE_BUDGET = 160
COMPAT_FILE_BUDGET = 40
AFTERNOON_BUDGET = 5000


@pytest.mark.parametrize(("folder", "budget"), FOLDER_BUDGETS.items())
def test_a_room_stays_within_its_code_lines(folder: str, budget: int) -> None:
    sizes = {path.name: _size(path) for path in python_files(PACKAGE / folder)}
    assert sum(sizes.values()) <= budget, f"{folder} has {sum(sizes.values())} code lines of {budget}: {sizes}"


@pytest.mark.parametrize(
    ("folder", "budget"),
    [
        (PACKAGE / "models", MODEL_FILE_BUDGET),
        (PACKAGE_FOLDERS["pagedcore_adapters"], ADAPTER_FILE_BUDGET),
        (PACKAGE / "compat", COMPAT_FILE_BUDGET),
    ],
    ids=["models", "adapters", "compat"],
)
def test_each_file_stays_within_its_code_lines(folder: Path, budget: int) -> None:
    too_long = {path.name: size for path in python_files(folder) if (size := _size(path)) > budget}
    assert not too_long, f"over {budget} code lines: {too_long}"


def test_the_afternoons_path_can_be_read_in_an_afternoon() -> None:
    """What README.md names: three rooms and one model."""
    rooms = [path for room in ("core", "runtime", "observe") for path in python_files(PACKAGE / room)]
    assert sum(_size(path) for path in [*rooms, PACKAGE / "models" / "decoder.py"]) < AFTERNOON_BUDGET


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ('"""Doc\nof two lines."""\n\n# comment\nx = 1  # one\n', 1),
        ("def f():\n    '''doc'''\n    return [\n        1,\n\n        2,\n    ]\n", 5),
        ('class A:\n    x: int = 1\n    """Field doc."""\n', 2),
        ('text = """\na\nb\n"""\n', 4),
    ],
)
def test_code_lines_leave_out_blanks_comments_and_docstrings(source: str, lines: int) -> None:
    assert code_lines(source) == lines


def test_kernels_and_adapters_are_folders_and_no_packages() -> None:
    # A top-level package called `kernels` would be taken for Hugging Face's distribution of that name.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "adapters" / "__init__.py").exists()


@pytest.mark.slow
def test_transformers_does_not_take_our_kernels_folder_for_a_package() -> None:
    pytest.importorskip("transformers")
    code = "from transformers import LlamaConfig, LlamaForCausalLM; from transformers.utils import is_kernels_available as k; print(k())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


def test_no_file_is_called_like_a_framework() -> None:
    names = {"litserve", "bentoml", "langchain", "langchain_core", "torch", "triton", "transformers", "kernels", "vllm"}
    assert not [path for path in package_files() if path.stem in names]


def test_each_package_is_marked_as_typed() -> None:
    for folder in PACKAGE_FOLDERS.values():
        assert (folder / "py.typed").is_file(), folder


def test_each_folder_of_pagedcore_is_a_regular_package() -> None:
    folders = {path.parent for path in python_files(PACKAGE)}
    assert not [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


def test_no_test_module_shares_its_name_with_a_support_module_or_a_package() -> None:
    stems = [path.stem for path in python_files(ROOT / "tests" / "support")]
    assert not [stem for stem in stems if stem.startswith("test_")]


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    core = _names(project["dependencies"])
    for package, declared in {
        "pagedcore": core | {"triton"} | _names(extras["transformers"] + extras["plot"] + extras["grammar"] + extras["otel"]),
        "pagedcore_kernels": {"torch", "triton"},
        "pagedcore_adapters": core | _names(extras["litserve"] + extras["bentoml"] + extras["langchain"]) | {"starlette", "pydantic"},
    }.items():
        for path in python_files(PACKAGE_FOLDERS[package]):
            undeclared = _undeclared(path, declared | {"pydantic", "starlette"})
            assert not undeclared, f"{path} imports {undeclared}, which pyproject.toml does not declare"


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


def _undeclared(path: Path, declared: set[str]) -> set[str]:
    """Third-party modules of a file that no declared distribution brings; one that is not installed counts under its own name."""
    known = _distributions_of_modules()
    ours = {*PACKAGE_FOLDERS, *sys.stdlib_module_names, "__main__"}
    modules = {module.split(".")[0] for module in imported_modules(path)} - ours
    return {module for module in modules if not {canonicalize_name(name) for name in known.get(module, [module])} & declared}


@functools.cache
def _distributions_of_modules() -> Mapping[str, list[str]]:
    return packages_distributions()


def _size(path: Path) -> int:
    return code_lines(path.read_text(encoding="utf-8"))
