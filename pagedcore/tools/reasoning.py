"""What a model thinks before it answers, told apart from the answer as it comes."""

from __future__ import annotations

from pagedcore.tools.json_scan import WHITESPACE
from pagedcore.tools.overlap import overlap
from pagedcore.tools.parts import TextPart

OPENING, CLOSING = "<think>", "</think>"


def thinks(template: str | None) -> bool:
    """Whether a chat template is of a model that writes down what it thinks."""
    return template is not None and CLOSING in template


def is_opened(prompt: str) -> bool:
    """Whether what the model continues has opened its reasoning: some templates do."""
    return prompt.rstrip(WHITESPACE).endswith(OPENING)


def is_closed(prompt: str) -> bool:
    """Whether it has closed it: what templates do where they are told not to think."""
    return prompt.rstrip(WHITESPACE).endswith(CLOSING)


class ReasoningParser:
    """Owns the text of which is not known yet what it is. Whitespace around the reasoning is left out.

    `prompt` is what the model continues: templates may open the reasoning themselves.
    """

    def __init__(self, prompt: str) -> None:
        self._text = ""
        self._is_reasoning = is_opened(prompt)
        self._may_open = not self._is_reasoning
        self._is_at_edge = True
        """Nothing but whitespace came since the last change."""

    def push(self, text: str) -> list[TextPart]:
        """What is certain now."""
        self._text += text
        parts: list[TextPart] = []
        if self._may_open and not self._open():
            return parts
        if self._is_reasoning:
            at = self._text.find(CLOSING)
            if at < 0:
                num_held = overlap(self._text, CLOSING)
                return self._take(len(self._text[: len(self._text) - num_held].rstrip(WHITESPACE)))
            parts = self._take(len(self._text[:at].rstrip(WHITESPACE)))
            self._text = self._text.lstrip(WHITESPACE).removeprefix(CLOSING)
            self._is_reasoning, self._is_at_edge = False, True
        return parts + self._take(len(self._text))

    def finish(self) -> list[TextPart]:
        """The text is over: what was held back."""
        self._may_open = False
        return self._take(len(self._text.rstrip(WHITESPACE)) if self._is_reasoning else len(self._text))

    def _open(self) -> bool:
        """Decide whether the text begins with reasoning; False while that is open."""
        begin = self._text.lstrip(WHITESPACE)
        if OPENING.startswith(begin) and begin != OPENING:
            return False
        self._may_open = False
        if begin.startswith(OPENING):
            self._text = begin.removeprefix(OPENING)
            self._is_reasoning = True
        else:
            self._is_at_edge = False  # an answer without reasoning stays as it is
        return True

    def _take(self, num_chars: int) -> list[TextPart]:
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        if self._is_at_edge:
            taken = taken.lstrip(WHITESPACE)
        if not taken:
            return []
        self._is_at_edge = False
        return [TextPart(taken, is_reasoning=self._is_reasoning)]
