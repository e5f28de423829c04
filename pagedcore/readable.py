"""Numbers as people read them."""

from __future__ import annotations


def percent(share: float) -> str:
    """A share: 85 %."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """12 ms, 1.4 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
