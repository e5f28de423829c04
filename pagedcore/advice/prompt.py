"""What the study needs to know of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.core.block_hash import Domain, make_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One choice of one request, as it was admitted."""

    request_id: str
    token_ids: Sequence[int]
    tenant: str | None = None
    cache_salt: str | None = None
    reads_cache: bool = True
    """False for a request that wants prompt logprobs, which need every token computed."""
    is_counted: bool = True
    """False for choices i > 0 of n, which are no lookup of their own."""
    is_greedy: bool = False
    """Greedy requests answer a repeated prompt with the same tokens."""

    @property
    def domain(self) -> Domain:
        """Who it shares blocks with."""
        return make_domain(self.cache_salt, self.tenant)
