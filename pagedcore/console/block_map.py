"""The KV pool as a map: what each block is, and how recently it was used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pagedcore.core.block_pool import BlockPool

MAX_CELLS = 1024
"""A larger pool is shown by every n-th block."""

HEAT_BOUNDS_S = (600.0, 60.0, 10.0, 1.0)
"""Idle times below which a block is warmer: 0 is cold, 4 is in use now."""


def block_map(pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """One character a cell: `states` of "a" active, "c" cached, "f" free, and `heat` of "0" to "4". Changes nothing."""
    stride = -(-pool.num_blocks // MAX_CELLS)
    now_s = clock()
    cells = [_cell(*glimpse, now_s) for glimpse in pool.glimpse(range(0, pool.num_blocks, stride))]
    return {
        "num_blocks": pool.num_blocks,
        "blocks_per_cell": stride,
        "states": "".join(state for state, _ in cells),
        "heat": "".join(str(heat) for _, heat in cells),
    }


def _cell(num_owners: int, is_hashed: bool, used_s: float, now_s: float) -> tuple[str, int]:
    if not (num_owners or is_hashed):
        return "f", 0
    heat = sum(now_s - used_s < bound_s for bound_s in HEAT_BOUNDS_S) if is_hashed else len(HEAT_BOUNDS_S)
    return ("a" if num_owners else "c"), heat
