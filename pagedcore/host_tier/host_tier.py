"""The blocks of host memory: what lies in them, which goes first, and what the next step copies."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagedcore.host_tier.swap_watch import SwapWatch
from pagedcore.host_tier.swapped import Swapped
from pagedcore.tenancy.eviction import EvictionOrder, make_order

Copy = tuple[int, int]
"""(device block, host block)."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What one step copies before it computes anything: all of `out`, then all of `back`."""

    out: tuple[Copy, ...] = ()
    """Device block to host block; no host block stands there twice."""
    back: tuple[Copy, ...] = ()
    """Host block to device block."""
    swapped_out: tuple[Swapped, ...] = ()
    """Whose blocks are among `out`, of the preempted requests that wait."""


_NO_COPIES = Copies()


class HostTier:
    """Owns the blocks of host memory: their contents by block hash, the LRU order, who reads them, and the copies that no plan carries yet.

    A host block is free, or filled and found by its block's hash, or held: read by a step that is planned or in flight. A held one is
    found, too, unless it was forgotten meanwhile; nobody gets it before that step is done::

        free --put--> filled <--put of another block-- filled (the oldest)
          ^             |  ^
          '----clear----'  '--end_reads-- held <--hold-- filled        (forgotten while held: end_reads makes it free)

    Why the copies are right, in whatever order steps are planned: the device makes the copies and the steps one after another, each
    step's copies out, then its copies back, then its own writes. A block is evicted while no step in flight writes it, and its next
    owner writes in the same step or later, so a copy out reads the evicted content. Of two copies out of one plan to one host block only
    the last is kept, and a held one is not filled anew, so a copy back reads what was put there.
    """

    def __init__(self, num_blocks: int, share_blocks: int | None = None) -> None:
        """0 blocks are no tier: nothing is kept, and nothing is found. `share_blocks` is a tenant's share of them, None is no shares."""
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._host_blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        """The same by host block."""
        self._order: EvictionOrder[bytes] = make_order(share_blocks)
        """Of the filled ones that are not held, the least recently used first: without shares, the next to be given up."""
        self._num_reads: Counter[int] = Counter()
        """Of the held ones."""
        self._out: dict[int, int] = {}
        """Host block -> device block."""
        self._back: list[Copy] = []
        self._watch = SwapWatch()

    @property
    def num_swapped_requests(self) -> int:
        """Preempted requests that wait while blocks of theirs were copied out."""
        return self._watch.num_swapped_requests

    def num_leading(self, block_hashes: Iterable[bytes]) -> int:
        """How many of these blocks are here, up to the first that is not; asks for no hash behind it."""
        num_found = 0
        for block_hash in block_hashes:
            if block_hash not in self._host_blocks:
                break
            num_found += 1
        return num_found

    def order(self) -> list[bytes]:
        """The blocks that can be given up, the next one first."""
        return list(self._order)

    def put(self, block_hash: bytes, device_block: int, tenant: str = "") -> None:
        """Keep the content of a block that the device gives up: the next plan copies it out. What is here already is only made the newest.

        Nothing is kept when every host block is held, or none is to be had for this tenant beside the others' shares.
        """
        if block_hash in self._host_blocks:
            if block_hash in self._order:
                self._order.move_to_end(block_hash)
            return
        host_block = self._take_host_block(block_hash, tenant)
        if host_block is not None:
            self._host_blocks[block_hash], self._hashes[host_block] = host_block, block_hash
            self._order[block_hash] = None
            self._out[host_block] = device_block

    def hold(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The host blocks of these hashes, which are here. A plan that is being made will read them."""
        host_blocks = [self._host_blocks[block_hash] for block_hash in block_hashes]
        for block_hash in block_hashes:
            if block_hash in self._order:
                del self._order[block_hash]
        self._num_reads.update(host_blocks)
        return host_blocks

    def copy_back(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """The next plan copies these held host blocks to these of the device."""
        self._back += zip(device_blocks, host_blocks, strict=True)

    def take_copies(self, now_s: float) -> Copies:
        """Hand over the copies for the plan that is being made."""
        if not (self._out or self._back):
            return _NO_COPIES
        swapped_out = self._watch.note_copied((self._hashes[host_block] for host_block in self._out), now_s)
        copies = Copies(tuple((block_id, host_block) for host_block, block_id in self._out.items()), tuple(self._back), swapped_out)
        self._out, self._back = {}, []
        return copies

    def end_reads(self, copies_back: Iterable[Copy]) -> None:
        """The step that made these copies is done, or failed. Its host blocks are the first to be given up, the last of them foremost:
        now the device has what is in them, too.
        """
        for _, host_block in copies_back:
            self._num_reads[host_block] -= 1
            if self._num_reads[host_block] == 0:
                del self._num_reads[host_block]
                self._let_go(host_block)

    def clear(self) -> None:
        """Forget every block. Those that are held come back with `end_reads`."""
        self._free.extend(host_block for host_block in self._hashes if host_block not in self._num_reads)
        for part in (self._host_blocks, self._hashes, self._order, self._out):
            part.clear()

    def watch(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """A request that computed these blocks was preempted: `Copies.swapped_out` says when they are copied out."""
        if self.num_blocks:
            self._watch.add(request_id, block_hashes)

    def unwatch(self, request_id: str) -> None:
        """It runs again, or is gone. Unknown ids are ignored."""
        self._watch.remove(request_id)

    def _take_host_block(self, block_hash: bytes, tenant: str) -> int | None:
        """A free host block, or one that is not held, whose block is forgotten: for this tenant's block, which counts to its share now."""
        if self._free:
            host_block = self._free.popleft()
        elif self._order.num_obtainable(tenant, 0):
            host_block = self._host_blocks.pop(self._order.pop_first(tenant)[0])
        else:
            return None
        self._order.note_taken([block_hash], tenant)
        return host_block

    def _let_go(self, host_block: int) -> None:
        block_hash = self._hashes.get(host_block)
        if block_hash is None:
            self._free.append(host_block)
        else:
            self._order[block_hash] = None
            self._order.move_to_end(block_hash, last=False)

    def check_invariants(self, copies_in_flight: Iterable[Copy]) -> None:
        """Raises AssertionError when the tier contradicts itself, or the copies back of the steps in flight."""
        held, filled = self._num_reads.keys(), {self._host_blocks[block_hash] for block_hash in self._order}
        assert sorted([*self._free, *filled, *held]) == list(range(self.num_blocks)), "a host block is lost or doubled"
        assert {host_block: block_hash for block_hash, host_block in self._host_blocks.items()} == self._hashes, (
            "the two indexes of host blocks disagree"
        )
        assert filled <= self._hashes.keys() <= filled | held, "a host block is found that is free"
        reads = Counter(host_block for _, host_block in (*copies_in_flight, *self._back))
        assert reads == self._num_reads, f"host blocks are read {dict(reads)} and held {dict(self._num_reads)}"
        assert self._out.keys() <= self._hashes.keys(), "a copy out fills a host block that is not found"
