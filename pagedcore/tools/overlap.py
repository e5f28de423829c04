"""Where a marker may have begun."""

from __future__ import annotations


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`, short of all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
