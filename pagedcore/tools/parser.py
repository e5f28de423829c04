"""Calls read out of a model's text as it comes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection

from pagedcore.tools.call_reader import CallReader
from pagedcore.tools.forms import ToolForm
from pagedcore.tools.json_scan import WHITESPACE, Step
from pagedcore.tools.overlap import overlap
from pagedcore.tools.parts import CallPart, Part, TextPart


class ToolCallParser:
    """Owns the text that may belong to a call and was not given out yet.

    The parts that come out do not depend on how the text was cut, but for where text and arguments are cut. What turns out to be
    no call comes out as text, markers and all; once a call's name is out, so much of it stays a call. Whitespace beside a call
    is left out.
    """

    def __init__(self, form: ToolForm, names: Collection[str], *, max_calls: int | None = None) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._text = ""
        """Came in and is not looked at, or not decided."""
        self._raw = ""
        """What becomes text if the call that is being read turns out to be none."""
        self._num_calls = 0
        self._is_beside_call = False
        """Nothing but whitespace came since the last call."""
        self._reader: CallReader | None = None
        self._num_sent: int | None = None
        """Characters of the call's arguments that are out; None before its name is."""
        self._parts: list[Part] = []
        self._advance: Callable[[], bool] = self._at_start if form.may_be_bare else self._in_content
        """The rule for what comes next: True when it has decided something and another look is worthwhile."""

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def is_in_call(self) -> bool:
        """The last call is out in part: at the end of the text, it was cut off."""
        return self._num_sent is not None

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        self._text += text
        while self._text and self._advance():
            pass
        return self._take_parts()

    def finish(self) -> list[Part]:
        """The text is over: what was held back."""
        if self._advance == self._after_call:
            self._text = ""
        elif self._reader is not None and self._num_sent is not None:
            self._text = ""  # a call that was cut off: what is certain of it is out
        self._emit(self._raw + self._text)
        self._raw = self._text = ""
        return self._take_parts()

    # ---- rules

    def _at_start(self) -> bool:
        """A whole answer may be a call without a marker."""
        stripped = self._text.lstrip(WHITESPACE)
        if not stripped:
            return False
        if stripped[0] == "{":
            self._raw = self._text[: -len(stripped)]
            self._text = stripped
            self._begin_call()
        else:
            self._advance = self._in_content
        return True

    def _in_content(self) -> bool:
        """Text up to the next marker; what may be the beginning of one, and whitespace before it, is held back."""
        opening, text = self._form.opening, self._text
        if self._num_calls == self._max_calls:
            return self._all_is_content()
        at = text.find(opening)
        if at >= 0:
            content = text[:at].rstrip(WHITESPACE)
            self._emit(content)
            self._raw, self._text = text[len(content) : at + len(opening)], text[at + len(opening) :]
            if self._form.list_opening:
                self._advance = self._at_list
            else:
                self._begin_call()
            return True
        certain = text[: len(text) - overlap(text, opening)].rstrip(WHITESPACE)
        self._emit(certain)
        self._text = text[len(certain) :]
        return False

    def _all_is_content(self) -> bool:
        self._emit(self._text)
        self._text = ""
        return False

    def _at_list(self) -> bool:
        stripped = self._text.lstrip(WHITESPACE)
        if not stripped:
            return False
        if not stripped.startswith(self._form.list_opening):
            return self._give_up()
        num_taken = len(self._text) - len(stripped) + len(self._form.list_opening)
        self._raw, self._text = self._raw + self._text[:num_taken], self._text[num_taken:]
        self._begin_call()
        return True

    def _in_call(self) -> bool:
        assert self._reader is not None, "a call is read by a reader"
        for position, char in enumerate(self._text):
            step = self._reader.push(char)
            if step is Step.WRONG:
                self._take(position)
                return self._give_up()
            if step is Step.LAST:
                self._take(position + 1)
                self._end_call()
                return True
        self._take(len(self._text))
        return False

    def _after_call(self) -> bool:
        """A separator and another call, or the end of the calls, which may be missing at the end of the text."""
        separator, closing = self._form.separator, self._form.closing
        rest = self._text.lstrip(WHITESPACE)
        if not rest:
            return False
        if separator and rest.startswith(separator) and self._num_calls != self._max_calls:
            self._text = rest[len(separator) :]
            self._begin_call()
            self._raw = separator
        elif closing and rest.startswith(closing):
            self._text = rest[len(closing) :]
            self._advance = self._in_content
        elif closing.startswith(rest):
            return False
        else:
            self._text = rest
            self._advance = self._in_content
        return True

    # ---- calls

    def _begin_call(self) -> None:
        self._reader = CallReader(self._names)
        self._num_sent = None
        self._advance = self._in_call

    def _take(self, num_chars: int) -> None:
        """These characters belong to the call; what is certain of it goes out."""
        self._raw, self._text = self._raw + self._text[:num_chars], self._text[num_chars:]
        self._send()

    def _send(self) -> None:
        assert self._reader is not None, "a call is read by a reader"
        if self._num_sent is None:
            if self._reader.name is None or not self._reader.arguments:
                return
            self._parts.append(CallPart(self._num_calls, call_id=self._new_id(), name=self._reader.name))
            self._num_calls += 1
            self._num_sent = 0
        piece = self._reader.arguments[self._num_sent :]
        self._num_sent += len(piece)
        if piece:
            self._parts.append(CallPart(self._num_calls - 1, arguments=piece))
        self._raw = ""

    def _end_call(self) -> None:
        self._reader, self._num_sent = None, None
        self._is_beside_call = True
        self._advance = self._after_call

    def _give_up(self) -> bool:
        """It is no call, or not to its end: what is not out yet is text."""
        self._emit(self._raw)
        self._raw = ""
        self._reader, self._num_sent = None, None
        self._advance = self._in_content
        return True

    def _new_id(self) -> str:
        length = self._form.id_length
        return f"call_{uuid.uuid4().hex[:24]}" if length is None else uuid.uuid4().hex[:length]

    # ---- parts

    def _emit(self, text: str) -> None:
        if self._is_beside_call:
            text = text.lstrip(WHITESPACE)
        if text:
            self._is_beside_call = False
            self._parts.append(TextPart(text))

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
