"""Block tables: which blocks hold a request's tokens, and which of them others may share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from pagedcore.core.block_hash import ROOT_HASH, hash_blocks
from pagedcore.core.block_pool import BlockContent, BlockPool
from pagedcore.core.events import BlockEvicted, BlocksForgotten
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.lookup import BlockHash, LookupReport
from pagedcore.core.request import Request
from pagedcore.core.step_record import StepRecord
from pagedcore.host_tier.host_tier import HostTier


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The resident blocks that a request can start from, those behind them in host memory, and the hash that is then missing."""

    block_ids: tuple[int, ...]
    num_live_blocks: int
    """Of these, blocks that have an owner now."""
    missing_hash: BlockHash | None
    """The first eligible block that is in neither; None when all are, or when the request does not read the cache."""
    num_host_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids) + self.num_host_blocks


@dataclass(frozen=True, slots=True)
class _DeferredFree:
    step_id: int
    request_id: str
    block_ids: list[int]


_NO_MATCH = PrefixMatch((), 0, None)
_HASHED_AT_ONCE = 32


class KVCacheManager:
    """Owns the block tables of requests, the tables whose release waits for a step in flight, and the index of blocks being computed."""

    def __init__(self, limits: SchedulerLimits, record: StepRecord) -> None:
        self._limits = limits
        self._record = record
        self._block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks, self._evicted, limits.tenants.share_blocks(limits.num_blocks))
        self.host = HostTier(limits.num_host_blocks, limits.tenants.share_blocks(limits.num_host_blocks))
        self._deferred: list[_DeferredFree] = []
        self._being_computed: Counter[BlockHash] = Counter()
        self._num_table_entries = 0

    def num_filled_slots(self, num_computed_tokens: int) -> int:
        """Slots of active blocks that hold a token, each once however many requests share it; their tables hold `num_computed_tokens`.

        Only an unshared block has unfilled slots, so they can be counted table by table. Blocks whose release waits for a
        step in flight count as filled.
        """
        num_unfilled = self._num_table_entries * self._block_size - num_computed_tokens
        return self.pool.num_active_blocks * self._block_size - num_unfilled

    @property
    def has_deferred_frees(self) -> bool:
        """Blocks will come back when a step in flight is committed."""
        return bool(self._deferred)

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest prefix on the device, and where that ends in host memory, that leaves a token to compute. Changes nothing but
        the request's memo of hashes.

        A preempted request takes back at most what it had computed, so that each prompt token stays a hit or computed.
        """
        max_blocks = self._max_shared_blocks(request)
        if max_blocks == 0:
            return _NO_MATCH
        block_ids = self.pool.leading(self._lazy_hashes(request, 0, max_blocks))
        num_host = self.host.num_leading(self._lazy_hashes(request, len(block_ids), max_blocks))
        num_found = len(block_ids) + num_host
        missing_hash = request.block_hashes[num_found] if num_found < max_blocks else None
        return PrefixMatch(tuple(block_ids), self.pool.num_owned(block_ids), missing_hash, num_host)

    def lookup(self, request: Request, match: PrefixMatch) -> LookupReport:
        """What the cache answered to this request, block by block. Changes nothing."""
        num_eligible = (request.num_prompt_tokens - 1) // self._block_size
        is_disabled = not (self._limits.enable_prefix_caching and request.reads_cache)
        num_here, num_hits = len(match.block_ids), match.num_blocks
        hashes = [] if is_disabled else self._hashes(request, num_eligible)[num_here:num_eligible]
        behind = tuple((h, self.pool.find(h) is not None, self.is_being_computed(h)) for h in hashes)
        missed = behind[match.num_host_blocks :]
        parent_key, next_tokens = self._parent_key(request, num_hits), self._block_tokens(request, num_hits)
        return LookupReport(
            num_prompt_tokens=request.num_prompt_tokens,
            block_size=self._block_size,
            num_eligible_blocks=num_eligible,
            num_resident_blocks=num_here + sum(is_resident for _, is_resident, _ in behind),
            live_blocks=match.num_live_blocks,
            pool_blocks=num_here - match.num_live_blocks,
            host_blocks=match.num_host_blocks,
            caching_disabled=is_disabled,
            missed=missed,
            sibling_common_tokens=self.pool.sibling_common_tokens(parent_key, next_tokens) if missed else None,
        )

    def is_being_computed(self, block_hash: BlockHash) -> bool:
        """Whether a running request is on its way to this block."""
        return block_hash in self._being_computed

    def share(self, request: Request, match: PrefixMatch, now_s: float, *, is_counted: bool) -> None:
        """Start an empty table with the matched blocks; those in host memory get new blocks, to which the next plan copies them."""
        assert not request.block_ids, f"request {request.request_id!r} holds blocks already"
        self.pool.acquire(match.block_ids)
        request.block_ids = list(match.block_ids)
        self._num_table_entries += len(match.block_ids)
        request.num_published_blocks = request.num_announced_blocks = request.num_reused_blocks = len(match.block_ids)
        if is_counted:
            self._record.step.reuse_gaps_s += self.pool.note_use(match.block_ids, request.add_request.group_id, now_s)
            self._record.step.num_reused_acquisitions += len(match.block_ids)
        request.num_counted_blocks = max(request.num_counted_blocks, len(match.block_ids))
        if match.num_host_blocks:
            host_blocks = self.host.hold(request.block_hashes[len(match.block_ids) : match.num_blocks])
            num_tokens = match.num_blocks * self._block_size
            self.host.copy_back(self.grow(request, num_tokens, now_s), host_blocks)
            self.publish(request, num_tokens, now_s)

    def num_fitting_tokens(self, request: Request) -> int:
        """Tokens that the request could compute now, with its own blocks and all that are available to its tenant."""
        num_blocks = len(request.block_ids) + self.pool.num_available_to(request.tenant)
        return num_blocks * self._block_size - request.num_computed_tokens

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks still to be allocated for the tokens that are known."""
        return max(0, self._limits.blocks_for(request.num_known_tokens) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int, now_s: float) -> list[int]:
        """Extend the table to hold `num_tokens` tokens; returns the new blocks. The caller has checked that they fit."""
        num_new = self._limits.blocks_for(num_tokens) - len(request.block_ids)
        if num_new <= 0:
            return []
        new_ids = self.pool.allocate(num_new, now_s, request.tenant)
        request.block_ids += new_ids
        self._num_table_entries += num_new
        num_blocks = len(request.block_ids)
        if num_blocks > request.num_counted_blocks:
            self._record.step.num_fresh_acquisitions += num_blocks - request.num_counted_blocks
            request.num_counted_blocks = num_blocks
        return new_ids

    def publish(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Let others find the full blocks among the first `num_tokens` tokens, which are computed or about to be, with ids known."""
        num_full, num_published = num_tokens // self._block_size, request.num_published_blocks
        if not self._limits.enable_prefix_caching or num_full <= num_published:
            return
        hashes = self._hashes(request, num_full)
        writer = request.add_request.group_id
        for index in range(num_published, num_full):
            content = BlockContent(hashes[index], self._parent_key(request, index), tuple(self._block_tokens(request, index)), writer)
            self.pool.publish(request.block_ids[index], content, now_s)
        if request.num_announced_blocks > num_published:
            self._retract(request, num_full)
        request.num_published_blocks = num_full

    def announce(self, request: Request) -> None:
        """Say that this request will compute the rest of its prompt's full blocks."""
        num_full = request.num_prompt_tokens // self._block_size
        if not self._limits.enable_prefix_caching or num_full <= request.num_published_blocks:
            return
        self._being_computed.update(self._hashes(request, num_full)[request.num_published_blocks : num_full])
        request.num_announced_blocks = num_full

    def free(self, request: Request, now_s: float, *, in_flight: bool) -> None:
        """Take the table away. While a step that uses it is in flight its blocks keep their owner until that step is done."""
        self._retract(request, request.num_announced_blocks)
        block_ids, request.block_ids = request.block_ids, []
        self._num_table_entries -= len(block_ids)
        request.num_published_blocks = request.num_announced_blocks = request.num_reused_blocks = 0
        if in_flight and block_ids:
            self._deferred.append(_DeferredFree(request.last_step_id, request.request_id, block_ids))
            self._record.num_deferred_frees += 1
        else:
            self.pool.release(block_ids, now_s)

    def complete_step(self, step_id: int, now_s: float) -> None:
        """Release what waited for this step."""
        for deferred in self._deferred:
            if deferred.step_id <= step_id:
                self.pool.release(deferred.block_ids, now_s)
        self._deferred = [deferred for deferred in self._deferred if deferred.step_id > step_id]

    def table_in_flight(self, request: Request) -> list[int]:
        """The blocks that the steps in flight use for this request, also after it gave them back."""
        waiting = (deferred.block_ids for deferred in self._deferred if deferred.request_id == request.request_id)
        return request.block_ids or next(waiting, [])

    def distrust(self, requests: Iterable[Request], now_s: float) -> None:
        """Forget the content of these requests' blocks, of blocks whose release waits for a step in flight, and of blocks without owner.

        All of host memory is forgotten, too.
        """
        tables = [request.block_ids for request in requests] + [deferred.block_ids for deferred in self._deferred]
        self.drop_cached(now_s, *chain.from_iterable(tables))

    def drop_cached(self, now_s: float, *others: int) -> None:
        """Forget every block without owner, here and in host memory, and the content of others."""
        block_hashes = self.pool.unpublish([*others, *self.pool.cached_order()])
        self.host.clear()
        if block_hashes:
            self._record.add(BlocksForgotten(block_hashes, now_s))

    def check_invariants(self, running: list[Request]) -> None:
        """Raises AssertionError when tables and pool disagree."""
        self.pool.check_invariants()
        owners = Counter(block_id for request in running for block_id in request.block_ids)
        owners.update(block_id for deferred in self._deferred for block_id in deferred.block_ids)
        for block_id in range(self.pool.num_blocks):
            refs = self.pool.ref_count(block_id)
            assert refs == owners[block_id], f"block {block_id} has ref_count {refs} and stands in {owners[block_id]} tables"
        for request in running:
            self._check_table(request)
        assert self._num_table_entries == sum(len(r.block_ids) for r in running), "the number of table entries drifted"
        announced = Counter(h for r in running for h in r.block_hashes[r.num_published_blocks : r.num_announced_blocks])
        assert announced == self._being_computed, "the index of blocks being computed is stale"

    def _evicted(self, block_id: int, event: BlockEvicted) -> None:
        self._record.add(event)
        self.host.put(event.block_hash, block_id, event.tenant)

    def _check_table(self, request: Request) -> None:
        assert len(request.block_ids) >= self._limits.blocks_for(request.num_computed_tokens), f"{request.request_id!r} outgrew its table"
        num_spare = len(request.block_ids) - self._limits.blocks_for(request.num_computed_tokens)
        assert request.is_protected or num_spare == 0, f"{request.request_id!r} holds {num_spare} blocks more than it needs"
        for index in range(request.num_published_blocks, len(request.block_ids)):
            assert self.pool.ref_count(request.block_ids[index]) == 1, f"unpublished block {request.block_ids[index]} is shared"

    def _max_shared_blocks(self, request: Request) -> int:
        if not (self._limits.enable_prefix_caching and request.reads_cache):
            return 0
        max_blocks = (request.num_known_tokens - 1) // self._block_size
        return min(max_blocks, request.num_ever_computed_tokens // self._block_size) if request.was_admitted else max_blocks

    def _hashes(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """The request's hashes, extended to at least `num_blocks`."""
        hashes = request.block_hashes
        if len(hashes) < num_blocks:
            tokens = request.token_ids[len(hashes) * self._block_size : num_blocks * self._block_size]
            hashes += hash_blocks(hashes[-1] if hashes else ROOT_HASH, request.domain, tokens, self._block_size)
        return hashes

    def _lazy_hashes(self, request: Request, start: int, end: int) -> Iterator[BlockHash]:
        """The same, few before they are asked for: a long prompt that waits is not hashed whole to learn that its beginning is missing."""
        for first in range(start - start % _HASHED_AT_ONCE, end, _HASHED_AT_ONCE):
            last = min(first + _HASHED_AT_ONCE, end)
            yield from self._hashes(request, last)[max(first, start) : last]

    def _block_tokens(self, request: Request, index: int) -> list[int]:
        return request.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def _parent_key(self, request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else request.domain

    def _retract(self, request: Request, num_blocks: int) -> None:
        """Take announced blocks below `num_blocks` out of the index: they are published now, or nobody computes them."""
        for block_hash in request.block_hashes[request.num_published_blocks : min(num_blocks, request.num_announced_blocks)]:
            self._being_computed[block_hash] -= 1
            if not self._being_computed[block_hash]:
                del self._being_computed[block_hash]
