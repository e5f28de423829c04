"""Who waits, tenant by tenant: in line for the next row, or held back by the tenant's own quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic

from pagedcore.tenancy.request_queue import R, RequestQueue


@dataclass(slots=True)
class _Tenant(Generic[R]):
    in_line: RequestQueue[R] = field(default_factory=RequestQueue)
    held: RequestQueue[R] = field(default_factory=RequestQueue)
    num_running: int = 0

    @property
    def num_waiting(self) -> int:
        return len(self.in_line) + len(self.held)

    @property
    def is_out_of_order(self) -> bool:
        """Whether a request that came since the last plan is in line, and one that goes before it is held back."""
        return bool(self.in_line and self.held) and self.held[0].order_key < self.in_line[-1].order_key


class TenantQueue(Generic[R]):
    """Owns the waiting requests, and the numbers of requests that run, tenant by tenant.

    Of each tenant so many requests may stand in `line` as its quota leaves it rows, its first ones; those behind them are held back
    until a row of the tenant gets free, or one of the first goes. Plans look at the line alone, so what a tenant has too much of
    costs them no look, and nobody stands behind it::

        add --> in line --start--> running --stop--> ended, or added again: preempted
                 ^   |
                 '---'-- settle: held back, and let into the line again

    Only `settle` moves requests between the two, once a plan: what came or went since the last plan changes nobody else's place.
    """

    def __init__(self, max_running: int | None) -> None:
        """None holds nobody back."""
        self.line: RequestQueue[R] = RequestQueue()
        self._max_running = max_running
        self._tenants: dict[str, _Tenant[R]] = {}
        self._held: dict[R, None] = {}
        self._unsettled: dict[str, None] = {}
        """Tenants of which a request came, went, started or stopped since the last plan."""
        self.new: dict[R, None] = {}
        """Requests in line that were added since the last plan."""
        self._num_new_of: Counter[str] = Counter()
        """The same by tenant."""

    def __len__(self) -> int:
        return len(self.line) + len(self._held)

    def __iter__(self) -> Iterator[R]:
        return chain(self.line, self._held)

    @property
    def num_held(self) -> int:
        """Requests that their tenants' quotas hold back."""
        return len(self._held)

    def num_held_up(self, num_free_rows: int) -> int:
        """Waiting requests but for those that have just come and find a free row: the next plan may well take them."""
        return len(self) - min(len(self.new), num_free_rows)

    def num_held_up_of(self, tenant: str, num_free_rows: int) -> int:
        """The same of one tenant, which has no more free rows than its quota leaves."""
        mine = self._tenants.get(tenant)
        return 0 if mine is None else mine.num_waiting - min(self._num_new_of[tenant], num_free_rows, self._num_rows_left(mine))

    def add(self, request: R) -> None:
        """Put a request into the line, at its place."""
        tenant = request.tenant
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant()
        self._tenants[tenant].in_line.add(request)
        self.line.add(request)
        self.new[request] = None
        self._num_new_of[tenant] += 1
        self._unsettled[tenant] = None

    def remove(self, request: R) -> None:
        """Take out a request that waits no more."""
        mine = self._tenants[request.tenant]
        if request in self._held:
            del self._held[request]
            mine.held.remove(request)
        else:
            self.line.remove(request)
            mine.in_line.remove(request)
        if request in self.new:
            del self.new[request]
            self._num_new_of[request.tenant] -= 1
        self._unsettled[request.tenant] = None

    def start(self, request: R) -> None:
        """Take a request out of the line: it runs."""
        self._tenants[request.tenant].num_running += 1
        self.remove(request)

    def stop(self, request: R) -> None:
        """A request runs no more; one that was preempted is added again."""
        self._tenants[request.tenant].num_running -= 1
        self._unsettled[request.tenant] = None

    def settle(self) -> list[tuple[R, bool]]:
        """Before a plan: hold requests back for which their tenants have no row, and let those into the line for which there is one again.

        Returns these, each with whether it is held now. Costs a look at each tenant of which something changed since the last plan.
        """
        self.new.clear()
        self._num_new_of.clear()
        moved: list[tuple[R, bool]] = []
        for tenant in self._unsettled:
            mine = self._tenants[tenant]
            if self._max_running is not None:
                moved += self._settle(mine, self._num_rows_left(mine))
            if not mine.num_running and not mine.num_waiting:
                del self._tenants[tenant]
        self._unsettled.clear()
        return moved

    def _settle(self, mine: _Tenant[R], num_rows_left: int) -> Iterator[tuple[R, bool]]:
        while len(mine.in_line) > num_rows_left or mine.is_out_of_order:
            request = mine.in_line[-1]
            self.line.remove(request)
            mine.in_line.remove(request)
            mine.held.add(request)
            self._held[request] = None
            yield request, True
        while mine.held and len(mine.in_line) < num_rows_left:
            request = mine.held[0]
            del self._held[request]
            mine.held.remove(request)
            mine.in_line.add(request)
            self.line.add(request)
            yield request, False

    def _num_rows_left(self, mine: _Tenant[R]) -> int:
        return len(self) if self._max_running is None else max(0, self._max_running - mine.num_running)

    def check_invariants(self, running: Counter[str]) -> None:
        """Raises AssertionError when the book contradicts itself, or how many requests of each tenant run."""
        self.line.check_invariants()
        counted = Counter({tenant: mine.num_running for tenant, mine in self._tenants.items()})
        assert +counted == running, f"{dict(running)} requests run, and {dict(counted)} are counted"
        in_line = Counter(request for mine in self._tenants.values() for request in mine.in_line)
        held = Counter(request for mine in self._tenants.values() for request in mine.held)
        assert in_line == Counter(self.line), "the line disagrees with the tenants' own"
        assert held == Counter(list(self._held)), "the requests held back disagree with the tenants' own"
