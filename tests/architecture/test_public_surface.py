"""What users see: public names, their annotations and documentation, the settings, the errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import pagedcore
from pagedcore import errors
from pagedcore.commands.field_docs import field_docs
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.errors import PagedCoreError
from pagedcore.sampling_params import SamplingParams
from support.repository import PACKAGE_FOLDERS, module_name, package_files, python_files

ERROR_LINE = re.compile(r"^\s{4}(?P<indent>[ |`-]*)(?P<name>\w+)(?: \((?P<builtin>\w+)\))?\s+(?P<status>\d{3})")


def test_all_is_sorted_and_complete() -> None:
    names = pagedcore.__all__
    assert names == sorted(names, key=_isort_key)
    assert len(set(names)) == len(names)
    assert set(names) == {*pagedcore._HOMES, *(name for name, _ in _error_classes()), "__version__"}
    assert set(names) <= set(dir(pagedcore))


def test_every_public_name_has_one_home_that_holds_it() -> None:
    for name in pagedcore._HOMES:
        home = PACKAGE_FOLDERS["pagedcore"].joinpath(*pagedcore._HOMES[name].split(".")).with_suffix(".py")
        defined = {node.name for node in ast.parse(home.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}
        assert pagedcore._ALIASES.get(name, name) in defined, f"{home.name} does not define {name}"


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(pagedcore))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told | {"__version__"} == set(pagedcore.__all__)


@pytest.mark.needs_torch
def test_every_public_name_can_be_imported() -> None:
    for name in pagedcore.__all__:
        assert getattr(pagedcore, name) is not None
    assert pagedcore.AsyncLLMEngine is pagedcore.AsyncEngine


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        pagedcore.Engin  # noqa: B018


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_setting_has_a_default_and_a_docstring(cls: type) -> None:
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert has_default, f"{cls.__name__}.{field.name} has no default"
        assert docs.get(field.name, "").endswith("."), f"{cls.__name__}.{field.name} has no docstring that is a sentence"


def test_config_and_plan_are_frozen() -> None:
    for cls in (EngineConfig, EnginePlan, SamplingParams):
        assert cls.__dataclass_params__.frozen, cls


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    drawn = [match for line in (errors.__doc__ or "").splitlines() if (match := ERROR_LINE.match(line))]
    parents: list[tuple[int, str]] = []
    seen: set[str] = set()
    for match in drawn:
        depth, cls = len(match["indent"]), getattr(errors, match["name"])
        parents = [(d, name) for d, name in parents if d < depth]
        if parents:
            assert cls.__bases__[0].__name__ == parents[-1][1], cls
        others = [base.__name__ for base in cls.__bases__[1:]]
        assert others == ([match["builtin"]] if match["builtin"] else []), cls
        assert cls.http_status == int(match["status"]), cls
        parents.append((depth, match["name"]))
        seen.add(match["name"])
    assert seen == {name for name, _ in _error_classes()}


@pytest.mark.parametrize("path", package_files(), ids=module_name)
def test_public_functions_are_annotated_and_public_things_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{path} has no module docstring"
    is_kernel = module_name(path).startswith("pagedcore_kernels")
    for owner, node in _public_definitions(tree):
        where = f"{path.name}: {owner}{node.name}"
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), f"{where} has no docstring"
        elif not is_kernel:
            _check_annotations(node, where)


@pytest.mark.parametrize("room", ["core", "runtime", "models", "observe", "openai", "text"])
def test_functions_are_short(room: str) -> None:
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in python_files(PACKAGE_FOLDERS["pagedcore"] / room)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths, f"{room} has no function"
    assert lengths[int(0.9 * (len(lengths) - 1))] <= 30, (
        f"one in ten functions of {room} is longer than {lengths[int(0.9 * len(lengths))]} lines"
    )


def _check_annotations(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> None:
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        assert argument.annotation is not None or argument.arg in ("self", "cls"), f"{where}: {argument.arg} has no annotation"
    assert node.returns is not None, f"{where} says nothing of what it returns"


def _public_definitions(tree: ast.Module) -> list[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    found: list[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found.append(("", node))
            if isinstance(node, ast.ClassDef):
                found += [
                    (f"{node.name}.", method)
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_")
                ]
    return found


def _error_classes() -> list[tuple[str, type]]:
    return [(name, cls) for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PagedCoreError)]


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order that ruff sorts `__all__` by."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name
