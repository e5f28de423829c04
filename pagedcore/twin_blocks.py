"""The same tokens under another salt or tenant: cached, and not for this request to find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from pagedcore.core.block_hash import Domain, make_domain
from pagedcore.core.lookup import BlockHash, LookupReport
from pagedcore.messages import AddRequest

MAX_REMEMBERED_BLOCKS = 131_072


_Holder = tuple[Domain, BlockHash, float]
"""Who computed a block last, as what, and when."""


class TwinBlocks:
    """Owns, by their tokens alone, the blocks that were missed and so computed lately, with the domain of the last request that did.

    About as many are remembered as the pool holds, in two generations as in `RecentBlocks`. While no request has a tenant or a
    salt all are one domain, and nothing is remembered.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = max(1, min(num_blocks, MAX_REMEMBERED_BLOCKS))
        self._young: dict[int, _Holder] = {}
        self._old: dict[int, _Holder] = {}
        self._has_domains = False
        self._block_size = 1

    def note(
        self, request: AddRequest, lookup: LookupReport, now_s: float, evicted_at: Callable[[BlockHash], float | None]
    ) -> frozenset[int]:
        """Which of the lookup's missed blocks, counted from 0, another domain holds now. Then all of them are this domain's."""
        self._has_domains = self._has_domains or request.tenant is not None or request.cache_salt is not None
        self._block_size = lookup.block_size
        if not self._has_domains or not lookup.missed:
            return frozenset()
        domain, young, old = make_domain(request.cache_salt, request.tenant), self._young, self._old
        keys = _keys(request.prompt_token_ids, lookup.block_size, lookup.num_eligible_blocks)[lookup.first_missing_block :]
        holders = [young.get(key) or old.get(key) for key in keys]
        young.update(zip(keys, [(domain, block_hash, now_s) for block_hash, _, _ in lookup.missed], strict=True))
        if len(young) >= self._capacity:
            self._old, self._young = young, {}
        return frozenset(
            number for number, holder in enumerate(holders) if holder is not None and holder[0] != domain and _is_held(holder, evicted_at)
        )

    def forget(self, block_hashes: Collection[BlockHash]) -> None:
        """These blocks are in the cache no more."""
        gone = frozenset(block_hashes)
        for holders in (self._young, self._old):
            for key in [key for key, (_, block_hash, _) in holders.items() if block_hash in gone]:
                del holders[key]

    def abandon(self, request: AddRequest, num_tokens: int) -> None:
        """A request that was noted ended before it had computed its last so many prompt tokens: it holds no block of them."""
        if not num_tokens or not self._has_domains:
            return
        domain, num_prompt_tokens = make_domain(request.cache_salt, request.tenant), len(request.prompt_token_ids)
        num_computed_blocks = (num_prompt_tokens - num_tokens) // self._block_size
        for key in _keys(request.prompt_token_ids, self._block_size, num_prompt_tokens // self._block_size)[num_computed_blocks:]:
            for holders in (self._young, self._old):
                if key in holders and holders[key][0] == domain:
                    del holders[key]


def _is_held(holder: _Holder, evicted_at: Callable[[BlockHash], float | None]) -> bool:
    """Whether the block was not evicted after it was computed."""
    _, block_hash, missed_s = holder
    evicted_s = evicted_at(block_hash)
    return evicted_s is None or evicted_s < missed_s


def _keys(token_ids: Sequence[int], block_size: int, num_blocks: int) -> list[int]:
    """One number a block, for all tokens up to its end: that other tokens have the same one is a matter of chance, about 2^-61."""
    blocks = [token_ids[start : start + block_size] for start in range(0, num_blocks * block_size, block_size)]
    return list(accumulate(blocks, lambda key, block: hash((key, *block)), initial=0))[1:]
