"""API keys: who may ask, and whose request it is."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence

from pagedcore.errors import AuthenticationError, ConfigError
from pagedcore.shown import shown


class ApiKeys:
    """Owns the keys of a server. With none at all it is open."""

    def __init__(self, keys: Sequence[str], tenants: Mapping[str, str]) -> None:
        """`tenants` is key -> name; the keys of `keys` have no tenant."""
        self._tenants = dict(tenants)
        self._keys = [key.encode() for key in (*keys, *tenants)]

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of a request, by its Authorization header. Raises `AuthenticationError` without a valid key where one is needed."""
        if not self._keys:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip().encode("latin-1")
        # Every key is compared in full: the time taken tells nothing about any of them.
        matches = [key for key in self._keys if hmac.compare_digest(key, sent)]
        if scheme.lower() != "bearer" or not matches:
            raise AuthenticationError("The API key is missing or wrong; send 'Authorization: Bearer KEY' with a key of this server.")
        return self._tenants.get(matches[0].decode())


def parse_tenant_priorities(pairs: Iterable[str]) -> dict[str, int]:
    """Tenant -> priority, out of NAME=NUMBER texts. Raises `ConfigError` for another form and for a tenant that comes twice."""
    priorities: dict[str, int] = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        try:
            priority = int(number)
        except ValueError:
            raise ConfigError(f"A tenant's priority has the form NAME=NUMBER, such as blue=10, and {shown(pair)} has not.") from None
        if name in priorities:
            raise ConfigError(f"The tenant {shown(name)} has two priorities; give one.")
        priorities[name] = priority
    return priorities


def parse_tenant_keys(pairs: Iterable[str]) -> dict[str, str]:
    """Key -> tenant, out of NAME=KEY texts. Raises `ConfigError`, which shows no key, for another form and for a key of two tenants."""
    tenants: dict[str, str] = {}
    for pair in pairs:
        name, _, key = pair.partition("=")
        if not name or not key:
            raise ConfigError("A tenant's key has the form NAME=KEY, such as blue=KEY-OF-BLUE; one given here has not.")
        if tenants.setdefault(key, name) != name:
            raise ConfigError(f"The tenants {tenants[key]!r} and {name!r} have the same key; give each its own.")
    return tenants
