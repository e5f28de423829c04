"""Stop strings over a stream of text: nothing that may belong to one is given out too early."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Owns how much of one stop string the end of the text spells (Knuth-Morris-Pratt): linear however the text is cut."""

    __slots__ = ("_failure", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._failure = _failure_table(stop)

    def advance(self, text: str) -> int | None:
        """The number of characters of `text` that complete the stop string, or None."""
        stop, matched = self.stop, self.num_matched
        start = 0
        if not matched:
            start = text.find(stop[0])
            if start < 0:
                return None
        for i in range(start, len(text)):
            char = text[i]
            while matched and stop[matched] != char:
                matched = self._failure[matched - 1]
            if stop[matched] == char:
                matched += 1
                if matched == len(stop):
                    return i + 1
        self.num_matched = matched
        return None


def _failure_table(stop: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = table[matched - 1]
        matched += stop[i] == stop[matched]
        table[i] = matched
    return table


class StopStrings:
    """Owns the text that is held back because a stop string may have begun in it.

    The stop string that is complete first wins; of two that end together, the longer one. So the result does not
    depend on how the text is cut into tokens.
    """

    __slots__ = ("_held", "_includes_stop", "_matchers")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._includes_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain, and the stop string that was found in it, if any (then the text ends there)."""
        won: tuple[int, int, str] | None = None
        for matcher in self._matchers:
            end = matcher.advance(text)
            if end is not None:
                found = (end, -len(matcher.stop), matcher.stop)
                won = found if won is None else min(won, found)
        if won is not None:
            return self._end(text, won[0], won[2])
        num_held = max([matcher.num_matched for matcher in self._matchers], default=0)
        if not num_held and not self._held:
            return text, None
        whole = self._held + text
        cut = len(whole) - num_held
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, end: int, stop: str) -> tuple[str, str]:
        cut = len(self._held) + end
        if not self._includes_stop:
            cut -= len(stop)
        emit = (self._held + text)[:cut]
        self._held = ""
        return emit, stop
