"""The docstrings below a dataclass's fields, read from its source: the help of each flag and the table in the README."""

from __future__ import annotations

import ast
import inspect
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal that follows it, white space folded. Fields without one are not in it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef), f"{cls!r} is not a class"
    docs: dict[str, str] = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = _string(following)
            if text is not None:
                docs[field.target.id] = " ".join(text.split())
    return docs


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
        return statement.value.value
    return None
