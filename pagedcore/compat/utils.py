"""`from pagedcore.utils import random_uuid`."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """A fresh request id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


__all__ = ["random_uuid"]
