"""Keys of clients and of tenants: who is let in, and as whom."""

from __future__ import annotations

import pytest

from pagedcore.errors import AuthenticationError, ConfigError
from pagedcore.http.api_keys import ApiKeys, parse_tenant_keys

KEYS = ApiKeys(("open",), {"b1": "blue", "b2": "blue", "schlüssel": "red"})


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer open", None), ("Bearer b1", "blue"), ("bearer  b2 ", "blue"), ("Bearer schl\xc3\xbcssel", "red")],
)
def test_a_key_names_its_tenant(authorization: str, tenant: str | None) -> None:
    assert KEYS.tenant_of(authorization) == tenant


@pytest.mark.parametrize("authorization", [None, "", "open", "Basic open", "Bearer", "Bearer ", "Bearer b", "Bearer b11", "Bearer blue"])
def test_without_a_valid_key_nobody_is_let_in(authorization: str | None) -> None:
    with pytest.raises(AuthenticationError):
        KEYS.tenant_of(authorization)


def test_without_any_key_the_server_is_open() -> None:
    assert ApiKeys((), {}).tenant_of("Bearer whatever") is None
    with pytest.raises(AuthenticationError):
        ApiKeys((), {"b1": "blue"}).tenant_of(None)


def test_tenants_are_read_as_name_and_key() -> None:
    assert parse_tenant_keys(["blue=b1", "blue=b2", "red=a=b", "blue=b1"]) == {"b1": "blue", "b2": "blue", "a=b": "red"}


@pytest.mark.parametrize("pair", ["s3cret", "=s3cret", "blue=", ""])
def test_a_pair_without_name_or_key_is_an_error_that_shows_no_key(pair: str) -> None:
    with pytest.raises(ConfigError, match="has the form NAME=KEY") as caught:
        parse_tenant_keys([pair])
    assert "s3cret" not in str(caught.value)


def test_a_key_of_two_tenants_is_an_error_that_shows_no_key() -> None:
    with pytest.raises(ConfigError, match="'blue' and 'red' have the same key") as caught:
        parse_tenant_keys(["blue=k3y", "red=k3y"])
    assert "k3y" not in str(caught.value)
