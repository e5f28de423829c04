"""How the answer of one chat is made and read: what the template is told, what the text must follow, what its parts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagedcore.client import TextFront
from pagedcore.errors import InvalidRequestError
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.definitions import Tools
from pagedcore.tools.forcing import calls_or_json, forced_grammar, free_text_or_calls
from pagedcore.tools.forms import FormName, ToolForm, form_of
from pagedcore.tools.parser import ToolCallParser
from pagedcore.tools.parts import Part, TextPart
from pagedcore.tools.reasoning import CLOSING, OPENING, ReasoningParser, is_closed, is_opened, thinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was asked of one answer."""

    tools: Tools | None = None
    form: ToolForm | None = None
    structured: StructuredOutputsParams | None = None
    """What the text must follow, calls included, from its first token or after its reasoning."""
    may_think: bool = False
    """The text may begin with reasoning: the model writes some, and nothing keeps it from it."""

    def continuing(self, prompt: str) -> Answer:
        """The same for what the model continues: where it may reason, what the text must follow begins after that.

        A caller who says himself where it begins is left alone, and a prompt that closes the reasoning leaves none to come.
        """
        if self.structured is None or not self.may_think or self.structured.reasoning_end is not None:
            return self
        if is_closed(prompt):
            return replace(self, may_think=False)
        start = None if is_opened(prompt) else OPENING
        return replace(self, structured=replace(self.structured, reasoning_start=start, reasoning_end=CLOSING))

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """For the chat template."""
        return None if self.tools is None else self.tools.shown

    @property
    def is_plain(self) -> bool:
        """The text is the content, from its first character to its last."""
        return not self.may_think and (self.tools is None or self.form is None)

    def parser(self, prompt: str) -> AnswerParser:
        """A new one for each choice; `prompt` is what the model continues."""
        calls = None
        if self.tools is not None and self.form is not None:
            calls = ToolCallParser(self.form, self.tools.names, max_calls=None if self.tools.are_parallel else 1)
        return AnswerParser(ReasoningParser(prompt) if self.may_think else None, calls)


def plan_answer(tools: Tools | None, structured: StructuredOutputsParams | None, text: TextFront, setting: FormName) -> Answer:
    """Raises `UnsupportedFeatureError` where the model cannot be offered tools, `InvalidRequestError` for what excludes each other."""
    template = text.chat_template(with_tools=tools is not None)
    if tools is None:
        return Answer(structured=structured, may_think=thinks(template))
    form = form_of(template, setting)
    return Answer(tools=tools, form=form, structured=_followed(tools, form, structured, text), may_think=thinks(template))


def _followed(tools: Tools, form: ToolForm, structured: StructuredOutputsParams | None, text: TextFront) -> StructuredOutputsParams | None:
    def token_id_of(marker: str) -> int | None:
        ids = text.encode(marker, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    if tools.choice != "auto":
        if structured is not None:
            message = f"{structured.field} goes with tool_choice='auto' only: with another choice the answer is a call."
            raise InvalidRequestError(message, param=structured.field)
        return forced_grammar(form, tools, token_id_of)
    if structured is None:
        return free_text_or_calls(form, tools, token_id_of) if any(tool.is_strict for tool in tools.tools) else None
    if structured.kind not in ("json", "json_object"):
        message = f"{structured.field} must ask for JSON where tools are offered, not for a {structured.kind}."
        raise InvalidRequestError(message, param=structured.field)
    followed = calls_or_json(form, tools, structured, token_id_of)
    return replace(followed, reasoning_end=structured.reasoning_end, reasoning_start=structured.reasoning_start)


class AnswerParser:
    """Owns the two parsers that a text passes: what is reasoning, then what is a call. Either may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def has_calls(self) -> bool:
        """There are some and none was cut off, by a stop string or by the model itself."""
        return self._calls is not None and self._calls.has_calls and not self._calls.is_in_call

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """What is certain now; after the last text, everything."""
        parts = [TextPart(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text) + (self._reasoning.finish() if is_last else [])
        if self._calls is None:
            return list(parts)
        found: list[Part] = []
        for part in parts:
            found += [part] if part.is_reasoning else self._calls.push(part.text)
        return found + (self._calls.finish() if is_last else [])
