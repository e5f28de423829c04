"""Chained hashes of full blocks: equal hashes mean the same tokens after the same prefix in the same domain."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import NewType

from pagedcore.core.lookup import BlockHash

Domain = NewType("Domain", bytes)
"""Who may share with whom: salt, tenant and LoRA content digest, each length-prefixed."""

ROOT_HASH = BlockHash(bytes(32))
"""The parent of a request's first block."""

MAX_TOKEN_ID = 2**31 - 1


def make_domain(cache_salt: str | None, tenant: str | None, lora_digest: bytes | None = None) -> Domain:
    """Encode the domain so that no two differ only by where one part ends; None and "" differ."""
    parts = (_encode(cache_salt), _encode(tenant), lora_digest)
    return Domain(b"".join(_length_prefixed(part) for part in parts))


def hash_block(parent: BlockHash, domain: Domain, token_ids: Sequence[int]) -> BlockHash:
    """sha256(parent || domain || token ids as int32 little-endian)."""
    return BlockHash(sha256(parent + domain + _packer(len(token_ids))(*token_ids)).digest())


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """There are as many as there are block sizes."""
    return struct.Struct(f"<{num_tokens}i").pack


def _encode(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _length_prefixed(part: bytes | None) -> bytes:
    """-1 for None, else the length, as int64 little-endian before the bytes."""
    return struct.pack("<q", -1) if part is None else struct.pack("<q", len(part)) + part
