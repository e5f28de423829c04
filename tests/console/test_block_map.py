"""The map of the KV pool: exact for a small pool, every n-th block of a large one."""

from __future__ import annotations

from pagedcore.console.block_map import MAX_CELLS, block_map
from pagedcore.core.block_pool import BlockContent, BlockPool
from support.observed import block_hash


def publish(pool: BlockPool, block_id: int, name: str, now_s: float) -> None:
    pool.publish(block_id, BlockContent(block_hash(name), b"", (block_id,), "writer"), now_s)


def test_each_block_shows_its_state_and_how_long_ago_it_was_used() -> None:
    pool = BlockPool(8, lambda *_: None)
    pool.allocate(7, 0.0)
    for block_id, used_s in [(0, 0.0), (1, 500.0), (2, 950.0), (3, 995.0), (4, 999.5)]:
        publish(pool, block_id, str(block_id), used_s)
        pool.release([block_id], used_s)
    publish(pool, 5, "shared", 0.0)  # held since long ago; block 6 is being filled, block 7 was never used
    found = block_map(pool, lambda: 1000.0)
    assert found == {"num_blocks": 8, "blocks_per_cell": 1, "states": "cccccaaf", "heat": "01234040"}


def test_a_large_pool_shows_every_n_th_block() -> None:
    pool = BlockPool(2 * MAX_CELLS + 1, lambda *_: None)
    pool.allocate(4, 0.0)
    found = block_map(pool, lambda: 0.0)
    assert found["blocks_per_cell"] == 3
    assert len(found["states"]) == len(found["heat"]) == -(-(2 * MAX_CELLS + 1) // 3)
    assert found["states"][:3] == "aaf"
