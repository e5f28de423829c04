"""Block hashes: equal only for the same tokens, after the same prefix, in the same domain."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from pagedcore.core.block_hash import ROOT_HASH, hash_blocks, make_domain
from pagedcore.core.lookup import BlockHash

names = st.none() | st.text(max_size=6)


def test_hash_is_sha256_of_parent_domain_and_int32_little_endian_ids() -> None:
    domain = make_domain("s", None)
    assert domain == struct.pack("<q", 1) + b"s" + struct.pack("<q", -1) * 2
    expected = hashlib.sha256(bytes(32) + domain + struct.pack("<3i", 1, 2, 70_000)).digest()
    assert hash_blocks(ROOT_HASH, domain, [1, 2, 70_000], 3) == [expected]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.sampled_from([1, 3, 8]), st.integers(0, 5))
def test_hashes_are_chained_over_full_blocks_however_many_come_at_once(token_ids: list[int], block_size: int, num_first: int) -> None:
    domain = make_domain(None, "t")
    expected, parent = [], ROOT_HASH
    for end in range(block_size, len(token_ids) + 1, block_size):
        block = struct.pack(f"<{block_size}i", *token_ids[end - block_size : end])
        parent = BlockHash(hashlib.sha256(parent + domain + block).digest())
        expected.append(parent)
    assert hash_blocks(ROOT_HASH, domain, token_ids, block_size) == expected
    first = expected[:num_first]
    rest = hash_blocks(first[-1] if first else ROOT_HASH, domain, token_ids[len(first) * block_size :], block_size)
    assert first + rest == expected


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
    first, second = hash_blocks(ROOT_HASH, domain, [1, 3], 1), hash_blocks(ROOT_HASH, domain, [2, 3], 1)
    assert first[1] != second[1]


def test_a_lone_surrogate_in_a_salt_is_hashed_and_not_refused() -> None:
    assert make_domain("\ud800", None) != make_domain("\ud801", None)
