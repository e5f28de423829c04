"""How models write calls: the forms that their chat templates teach them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedcore.errors import UnsupportedFeatureError

FormName = Literal["auto", "hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """One form: markers around calls, each of which is a JSON object with a name and arguments."""

    name: str
    opening: str
    """Begins one call, or a list of them."""
    list_opening: str = ""
    """Follows `opening`; whitespace may stand between."""
    separator: str = ""
    """Stands between two calls of one list; without one each call has its own markers."""
    closing: str = ""
    may_be_bare: bool = False
    """A text that begins with a call needs no `opening`."""
    arguments_key: str = "arguments"
    id_length: int | None = None
    """Characters of a call's id, where the template looks at them."""


HERMES = ToolForm(name="hermes", opening="<tool_call>", closing="</tool_call>")
"""Hermes, Qwen 2.5 and 3, SmolLM 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once a call."""
LLAMA3 = ToolForm(name="llama3", opening="<|python_tag|>", separator=";", may_be_bare=True, arguments_key="parameters")
"""Llama 3.1 to 3.3: {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>."""
MISTRAL = ToolForm(name="mistral", opening="[TOOL_CALLS]", list_opening="[", separator=",", closing="]", id_length=9)
"""Mistral 7B 0.3, Nemo, Small 2409: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]."""

FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}

_OTHER_FORMS = ("[ARGS]", "<function=", "<arg_key>", "<｜tool", "<|tool_call_begin|>")
"""Marks of forms that are not read: their templates may hold markers of ours, too."""


def form_of(template: str | None, setting: FormName = "auto") -> ToolForm:
    """The form that a chat template teaches; the setting says it where the template does not show it.

    Raises `UnsupportedFeatureError` where the template shows no tools to the model, or teaches another form.
    """
    if template is None or "tools" not in template:
        raise UnsupportedFeatureError(
            "tools are not offered with this model: its chat template does not show them to it; set chat_template to one that does.",
            param="tools",
        )
    if setting != "auto":
        return FORMS[setting]
    form = None if any(mark in template for mark in _OTHER_FORMS) else _taught(template)
    if form is None:
        known = ", ".join(FORMS)
        raise UnsupportedFeatureError(
            f"tools are not offered with this model: its chat template teaches none of the forms {known}; set tool_parser to force one.",
            param="tools",
        )
    return form


def _taught(template: str) -> ToolForm | None:
    if MISTRAL.opening in template:
        return MISTRAL
    if HERMES.opening in template:
        return HERMES
    is_llama = LLAMA3.opening in template or ("<|start_header_id|>" in template and '"parameters": ' in template)
    return LLAMA3 if is_llama else None
