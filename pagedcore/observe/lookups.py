"""The cache section: lookups once a request, evictions, and the work that a miss made necessary."""

from __future__ import annotations

from collections import Counter, defaultdict

from pagedcore.core.events import BlockEvicted, BlocksForgotten, Finished, PrefillChunk, Resumed
from pagedcore.core.lookup import LookupReport
from pagedcore.messages import AddRequest
from pagedcore.observe.explain import LookupStore
from pagedcore.observe.ghosts import BlockHistory
from pagedcore.observe.ledger import Handlers, Ledger
from pagedcore.observe.misses import explain_misses
from pagedcore.outputs import CacheReport
from pagedcore.twin_blocks import TwinBlocks


class LookupBook:
    """Owns the block history and the lookups; writes the cache counters of the ledger."""

    def __init__(self, ledger: Ledger, num_blocks: int) -> None:
        self._ledger = ledger
        self._history = BlockHistory(num_blocks)
        self._twins = TwinBlocks(num_blocks)
        self.store = LookupStore()
        self._avoidable: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By the step that computes the tokens, and reason."""
        self.evicted: list[BlockEvicted] = []
        """Not counted yet; a step may have hundreds."""
        self._unobserved: list[BlockEvicted] = []

    def handlers(self) -> Handlers:
        """What is done with each event that is written down here."""
        return {PrefillChunk: self.chunk, Resumed: self.resumed, BlockEvicted: self.evicted.append, BlocksForgotten: self.forgotten}

    def looked_up(self, request: AddRequest, tenant: str, lookup: LookupReport, now_s: float) -> None:
        """Count one lookup, once a request, at its first admission, and name its misses."""
        self.remember_evictions()
        isolated = self._twins.note(request, lookup, now_s, self._history.evicted_at)
        misses = explain_misses(lookup, self._history, now_s, isolated)
        report = self.store.open(request.request_id, lookup, misses)
        self._count_levels(tenant, lookup)
        self._count_misses(report, misses.num_ghost_hits)
        num_ideal_blocks = lookup.first_missing_block + self._history.num_ideal_blocks(lookup.missed)
        self._ledger.add("pagedcore_prefix_cache_ideal_hit_tokens_total", num_ideal_blocks * lookup.block_size)

    def _count_levels(self, tenant: str, lookup: LookupReport) -> None:
        add = self._ledger.add
        add("pagedcore_page_lookups_total", lookup.num_eligible_blocks)
        add("pagedcore_page_hits_total", lookup.num_resident_blocks)
        add("pagedcore_prefix_cache_queries_tokens_total", lookup.num_prompt_tokens, tenant)
        for source, num_blocks in (("live", lookup.live_blocks), ("pool", lookup.pool_blocks), ("host", lookup.host_blocks)):
            add("pagedcore_prefix_cache_hit_tokens_total", num_blocks * lookup.block_size, source, tenant)

    def _count_misses(self, report: CacheReport, num_ghost_hits: int) -> None:
        for reason, num_blocks in report.miss_blocks.items():
            self._ledger.add("pagedcore_cache_miss_blocks_total", num_blocks, reason)
        self._ledger.add("pagedcore_pool_ghost_hits_total", num_ghost_hits)

    def chunk(self, event: PrefillChunk) -> None:
        """Prompt tokens were computed; those of an avoidable miss wait for `take_avoidable`."""
        lookup = self.store.running(event.request_id)
        if lookup is not None:
            for reason, num_tokens in lookup.advance(event.num_tokens):
                self._avoidable[event.step_id][reason] += num_tokens

    def resumed(self, event: Resumed) -> None:
        """Work lost in a preemption comes again: it is counted as recomputed, and is no part of a miss."""
        self._ledger.add("pagedcore_recomputed_tokens_total", event.num_recomputed_tokens)
        lookup = self.store.running(event.request_id)
        if lookup is not None:
            lookup.num_to_recompute += event.num_recomputed_tokens

    def take_avoidable(self, step_id: int) -> dict[str, int]:
        """Avoidable tokens of a step by reason; counts them, and those of failed steps before it, whose time nobody measured."""
        if not self._avoidable:
            return {}
        own = dict(self._avoidable.get(step_id, {}))
        done = [step for step in self._avoidable if step <= step_id]
        for reason, num_tokens in sum((self._avoidable.pop(step) for step in done), Counter[str]()).items():
            self._ledger.add("pagedcore_miss_penalty_tokens_total", num_tokens, reason)
        return own

    def remember_evictions(self, *, counts: bool = True) -> None:
        """Count what is in `evicted`: before each lookup, which asks for it, and after each batch of events."""
        if self.evicted:
            self._history.evicted([event.block_hash for event in self.evicted], [event.now_s for event in self.evicted])
            if counts:
                self._ledger.add("pagedcore_pool_evictions_total", len(self.evicted))
                self._unobserved += self.evicted
            self.evicted.clear()

    def forgotten(self, event: BlocksForgotten) -> None:
        """What the cache was told to forget is nobody's any more. It was no eviction: a larger pool had lost it, too."""
        self._twins.forget(event.block_hashes)

    def observe_evictions(self) -> None:
        """Bring the histograms of evicted blocks up to date: in bulk, at each export."""
        evicted, self._unobserved = self._unobserved, []
        self._ledger.observe_many("pagedcore_block_reuses", [event.num_reuses for event in evicted])
        self._ledger.observe_many("pagedcore_block_lifetime_seconds", [event.lifetime_s for event in evicted])
        self._ledger.observe_many("pagedcore_block_idle_seconds", [event.idle_s for event in evicted])

    def finished(self, event: Finished) -> None:
        """Complete the partition of a request that was looked up; others touch none of it."""
        computed, abandoned = event.num_computed_prompt_tokens, event.num_abandoned_prompt_tokens
        if self.store.close(event.request.request_id, computed, abandoned):
            self._ledger.add("pagedcore_computed_prompt_tokens_total", computed)
            self._ledger.add("pagedcore_abandoned_prompt_tokens_total", abandoned)
            self._twins.abandon(event.request, abandoned)
