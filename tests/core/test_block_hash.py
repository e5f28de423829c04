"""Block hashes: equal only for the same tokens, after the same prefix, in the same domain."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from pagedcore.core.block_hash import ROOT_HASH, hash_block, make_domain

names = st.none() | st.text(max_size=6)


def test_hash_is_sha256_of_parent_domain_and_int32_little_endian_ids() -> None:
    domain = make_domain("s", None)
    assert domain == struct.pack("<q", 1) + b"s" + struct.pack("<q", -1) * 2
    expected = hashlib.sha256(bytes(32) + domain + struct.pack("<3i", 1, 2, 70_000)).digest()
    assert hash_block(ROOT_HASH, domain, [1, 2, 70_000]) == expected


def test_none_and_empty_salt_are_different_domains() -> None:
    assert make_domain(None, None) != make_domain("", None)
    assert make_domain(None, None) != make_domain(None, "")


@given(names, names, names, names)
def test_domains_differ_whenever_salt_or_tenant_differ(
    salt: str | None, tenant: str | None, salt2: str | None, tenant2: str | None
) -> None:
    assert (make_domain(salt, tenant) == make_domain(salt2, tenant2)) == ((salt, tenant) == (salt2, tenant2))


def test_lora_content_separates_domains() -> None:
    assert len({make_domain(None, None), make_domain(None, None, b""), make_domain(None, None, b"x")}) == 3


def test_the_same_tokens_after_another_prefix_hash_differently() -> None:
    domain = make_domain(None, None)
    first, second = hash_block(ROOT_HASH, domain, [1]), hash_block(ROOT_HASH, domain, [2])
    assert hash_block(first, domain, [3]) != hash_block(second, domain, [3])


def test_a_lone_surrogate_in_a_salt_is_hashed_and_not_refused() -> None:
    assert make_domain("\ud800", None) != make_domain("\ud801", None)
