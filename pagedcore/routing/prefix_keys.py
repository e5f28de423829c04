"""A prompt's chain of block hashes, short enough to send around and to remember by the ten thousand."""

from __future__ import annotations

from typing import NewType

from pagedcore.core.block_hash import ROOT_HASH, hash_blocks, make_domain
from pagedcore.messages import AddRequest

PrefixKey = NewType("PrefixKey", int)
"""The first eight bytes of a block's hash: equal for equal tokens after an equal prefix in the same domain."""

MAX_PREFIX_KEYS = 1024
"""Blocks of a prompt that are looked at: two prompts that share so many are alike enough, and a front's event loop does not stall."""


def prefix_keys(request: AddRequest, block_size: int) -> list[PrefixKey]:
    """One key for each block of the prompt that an engine could find cached, `MAX_PREFIX_KEYS` at most."""
    num_blocks = min((len(request.prompt_token_ids) - 1) // block_size, MAX_PREFIX_KEYS)
    if num_blocks < 1:
        return []
    domain = make_domain(request.cache_salt, request.tenant)
    hashes = hash_blocks(ROOT_HASH, domain, request.prompt_token_ids[: num_blocks * block_size], block_size)
    return [PrefixKey(int.from_bytes(one[:8], "little")) for one in hashes]
