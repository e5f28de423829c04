"""What became of a preempted request's blocks in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Swapped:
    """Event of the core: blocks of a preempted request were copied, to host memory while it waited, or back when it was admitted again.

    What host memory holds already is not copied out a second time, so more blocks may come back than went. Times are those of the
    plan that carries the copies.
    """

    request_id: str
    now_s: float
    direction: Literal["out", "in"]
    num_blocks: int
