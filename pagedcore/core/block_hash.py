"""Chained hashes of full blocks: equal hashes mean the same tokens after the same prefix in the same domain."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
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


def hash_blocks(parent: BlockHash, domain: Domain, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Of each full block that follows `parent`: sha256(parent || domain || token ids as int32 little-endian)."""
    tokens = array("i", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    content, num_bytes, hashes = tokens.tobytes(), block_size * tokens.itemsize, []
    for end in range(num_bytes, len(content) + 1, num_bytes):
        parent = BlockHash(sha256(parent + domain + content[end - num_bytes : end]).digest())
        hashes.append(parent)
    return hashes


def _encode(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _length_prefixed(part: bytes | None) -> bytes:
    """-1 for None, else the length, as int64 little-endian before the bytes."""
    return struct.pack("<q", -1) if part is None else struct.pack("<q", len(part)) + part
