"""Fields of JSON objects: nothing is ignored, what is unknown or not offered is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.shown import shown

Neutral = Mapping[str, tuple[object, ...]]
"""Field that is not offered -> values, beside null, that ask for nothing."""

_LONGEST_NAME = 64
"""Characters of an unknown name that are looked at; our own are shorter."""


def check_fields(data: Mapping[str, Any], *, known: Iterable[str], not_offered: Neutral, where: str = "") -> None:
    """Raise for the first field that is unknown, or that is not offered and asks for something."""
    known = frozenset(known)
    for name, value in data.items():
        if name in not_offered:
            if value is not None and value not in not_offered[name]:
                field = f"{where}{name}"
                raise UnsupportedFeatureError(f"{field}={shown(value)} is not offered by this server; leave it out.", param=field)
        elif name not in known:
            raise _unknown_field(name, known.union(not_offered), where)


def _unknown_field(name: str, known: Iterable[str], where: str) -> InvalidRequestError:
    name = name[:_LONGEST_NAME]
    nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "leave it out."
    return InvalidRequestError(f"{where}{name} is not a field of this request; {hint}", param=f"{where}{name}", code="unknown_field")
