"""Triton 3.6 reads its one-element arrays with `int()`, which numpy 2.4 refuses: `.item()` takes its place while a kernel runs."""

from __future__ import annotations

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor_with_item(tensor, scope) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor_with_item
