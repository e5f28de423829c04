"""Bounded label values: what callers name must not grow the number of series without limit."""

from __future__ import annotations

from pagedcore.messages import AddRequest
from pagedcore.observe.catalogue import ADAPTERS, UNNAMED

OTHER = "other"
MAX_TENANTS = 64
MAX_CLASSES = 16
MAX_ADAPTERS = 8


class BoundedLabel:
    """Owns the values of one label: the first `max_values` keep their name, all later ones are "other".

    No name (None) is always "", and counts towards no limit.
    """

    def __init__(self, max_values: int, known: tuple[str, ...] = ()) -> None:
        self._max_values = max_values
        self._known: set[str] = set(known)

    def value(self, name: str | None) -> str:
        """The label value for a name; remembers it while there is room. What UTF-8 cannot write is "other"."""
        if name is None or name == UNNAMED:
            return UNNAMED
        if _is_text(name) and (name in self._known or len(self._known) < self._max_values):
            self._known.add(name)
            return name
        return OTHER


class RequestLabels:
    """The bounded labels of one engine's requests."""

    def __init__(self) -> None:
        self._tenants = BoundedLabel(MAX_TENANTS)
        self._classes = BoundedLabel(MAX_CLASSES)
        self._adapters = BoundedLabel(MAX_ADAPTERS, ADAPTERS)

    def of(self, request: AddRequest) -> tuple[str, str, str]:
        """Adapter, tenant and class."""
        return self._adapters.value(request.adapter), self.tenant(request.tenant), self._classes.value(request.request_class)

    def tenant(self, name: str | None) -> str:
        return self._tenants.value(name)


def _is_text(name: object) -> bool:
    """One label with half a surrogate pair would cost the whole scrape."""
    return isinstance(name, str) and name.encode(errors="replace").decode() == name
