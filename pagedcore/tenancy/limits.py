"""The numbers that bound one tenant, and what a request is told that goes beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore.errors import PoolTooSmallError, TenantQuotaError
from pagedcore.shown import shown

UNNAMED = ""
"""The tenant of requests that name none: together they are one tenant, as in the metrics, with the same quotas as each other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have; None is no limit. The same for each tenant."""

    max_running: int | None = None
    """Most requests that run at once."""
    max_waiting: int | None = None
    """Most requests that wait in the queue."""
    cache_fraction: float | None = None
    """Share of the blocks, of the pool and of host memory, within which a tenant's blocks are its own."""

    def share_blocks(self, num_blocks: int) -> int | None:
        """A tenant's share of so many blocks, at least one; None where tenants have no shares."""
        return None if self.cache_fraction is None else max(1, int(self.cache_fraction * num_blocks))

    def check_waiting(self, tenant: str, num_waiting: int) -> None:
        """Raises `TenantQuotaError` when one more of this tenant may not wait."""
        if self.max_waiting is not None and num_waiting >= self.max_waiting:
            whose = f"of the tenant {shown(tenant)}" if tenant != UNNAMED else "without a tenant"
            raise TenantQuotaError(
                f"{num_waiting} requests {whose} wait and max_waiting_per_tenant is {self.max_waiting}; "
                "try again later, or raise max_waiting_per_tenant."
            )

    def check_blocks(self, num_needed: int, num_blocks: int) -> None:
        """Raises `PoolTooSmallError` for a request that alone needs more than its tenant's share."""
        share = self.share_blocks(num_blocks)
        if share is not None and num_needed > share:
            raise PoolTooSmallError(
                f"The request needs {num_needed} KV blocks, and the share of one tenant is {share} of {num_blocks} "
                f"(cache_fraction_per_tenant={self.cache_fraction:g}); lower max_tokens, or raise cache_fraction_per_tenant.",
                param="max_tokens",
            )


NO_TENANT_LIMITS = TenantLimits()
