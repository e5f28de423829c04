"""How long hypothesis searches. `make check` runs with its profile `check`, everything else with one that draws five times as many."""

from __future__ import annotations

from hypothesis import settings

FULL_EXAMPLES, CHECK_EXAMPLES = 100, 20


def examples(number: int) -> int:
    """Of `number` for `max_examples`: all, or the share that the profile leaves. For searches that take more than an instant."""
    return -(-number * min(settings.default.max_examples, FULL_EXAMPLES) // FULL_EXAMPLES)
