"""The repository as tests of its shape see it: its folders, its Python files, their code lines and imports."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE_FOLDERS = {
    "pagedcore": ROOT / "pagedcore",
    "pagedcore_kernels": ROOT / "kernels" / "pagedcore_kernels",
    "pagedcore_adapters": ROOT / "adapters" / "pagedcore_adapters",
}

_LAYOUT_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}


def python_files(folder: Path) -> list[Path]:
    """Every .py file below a folder."""
    return sorted(folder.rglob("*.py"))


def package_files() -> list[Path]:
    """Every .py file that the wheel holds."""
    return [path for folder in PACKAGE_FOLDERS.values() for path in python_files(folder)]


def module_name(path: Path) -> str:
    """`pagedcore/core/step.py` -> `pagedcore.core.step`."""
    for package, folder in PACKAGE_FOLDERS.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise AssertionError(f"{path} is in no package")


def code_lines(source: str) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    documented = {line for start, end in _docstring_spans(source) for line in range(start, end + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def _docstring_spans(source: str) -> Iterator[tuple[int, int]]:
    """String statements: docstrings, and the ones below fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


def imported_modules(path: Path, *, module_level_only: bool = False) -> set[str]:
    """Modules that a file imports when it runs (not those under `if TYPE_CHECKING`). `from a.b import c` is `a.b` and `a.b.c`."""
    found: set[str] = set()
    _collect(ast.parse(path.read_text(encoding="utf-8")), found, module_level_only)
    return found


def _collect(node: ast.AST, found: set[str], module_level_only: bool) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            found.add(child.module)
            found.update(f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                _collect(other, found, module_level_only)
        elif not (module_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            _collect(child, found, module_level_only)
