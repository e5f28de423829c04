"""Prompts that differ early and then go on alike: what varies stands in front of what could be shared."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from statistics import median_low

from pagedcore.core.block_hash import Domain

MAX_DOMAINS = 32
NUM_RECENT_PROMPTS = 4
NUM_FINDINGS = 64
MAX_EXAMINED_TOKENS = 4096
"""Of a prompt's head; what is kept comes to 2 MiB at most."""

WINDOW_TOKENS = 16
MIN_BODY_TOKENS = 128
"""A shorter run is not worth a sentence."""

MIN_EXAMINED = 8
EXAMINE_ALL_BEFORE = 64
EXAMINE_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """Most prompts of a tenant part at a token, before a run of tokens that they share."""

    tenant: str | None
    token: int
    """Index of the first token that differs, in the median prompt."""
    num_body_tokens: int


@dataclass(slots=True)
class _Peers:
    """The prompts of one domain that were examined last, and what was found: (first differing token, shared run) or None."""

    tenant: str | None
    prompts: deque[array[int]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_PROMPTS))
    findings: deque[tuple[int, int] | None] = field(default_factory=lambda: deque(maxlen=NUM_FINDINGS))
    num_seen: int = 0


class DivergenceFinder:
    """Owns a few recent prompts of each domain. It examines the first prompts of a domain, then one in eight."""

    def __init__(self) -> None:
        self._peers: OrderedDict[Domain, _Peers] = OrderedDict()

    def examine(self, domain: Domain, tenant: str | None, token_ids: Sequence[int]) -> None:
        """Compare a prompt with recent ones of its domain."""
        peers = self._peers.setdefault(domain, _Peers(tenant))
        self._peers.move_to_end(domain)
        if len(self._peers) > MAX_DOMAINS:
            self._peers.popitem(last=False)
        peers.num_seen += 1
        if peers.num_seen > EXAMINE_ALL_BEFORE and peers.num_seen % EXAMINE_ONE_IN:
            return
        prompt = array("i", token_ids[:MAX_EXAMINED_TOKENS])
        if peers.prompts:
            peers.findings.append(_finding(prompt, peers.prompts))
        peers.prompts.append(prompt)

    def divergences(self) -> list[Divergence]:
        """Domains in which at least half of the examined prompts hide a shared body, the largest body first."""
        found = []
        for peers in self._peers.values():
            findings = [finding for finding in peers.findings if finding is not None]
            if len(peers.findings) >= MIN_EXAMINED and 2 * len(findings) >= len(peers.findings):
                token, body = (median_low(numbers) for numbers in zip(*findings, strict=True))
                found.append(Divergence(peers.tenant, token, body))
        return sorted(found, key=lambda divergence: divergence.num_body_tokens, reverse=True)


def _finding(prompt: array[int], others: Sequence[array[int]]) -> tuple[int, int] | None:
    """(tokens shared from the start, longest run shared behind them), if that run is worth moving."""
    num_common = max(num_common_tokens(prompt, other) for other in others)
    run = max(longest_shared_run(prompt, other, num_common) for other in others)
    return (num_common, run) if run >= MIN_BODY_TOKENS else None


def num_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return next(compress(count(), map(ne, first, second)), min(len(first), len(second)))


def longest_shared_run(prompt: array[int], other: array[int], start: int) -> int:
    """Tokens of the longest run that both have, wherever it stands, from `start` on; one shorter than two windows may go unseen."""
    width = prompt.itemsize * WINDOW_TOKENS
    ours, theirs = prompt[start:].tobytes(), other[start:].tobytes()
    windows = {theirs[at : at + width]: at for at in range(0, len(theirs) - width + 1, width)}
    longest = at = 0
    while windows and at <= len(ours) - width:
        found = windows.get(ours[at : at + width])
        if found is None:
            at += prompt.itemsize
            continue
        end, length = _extend(ours, theirs, at, found)
        longest, at = max(longest, length // prompt.itemsize), max(end, at + prompt.itemsize)
    return longest


def _extend(ours: bytes, theirs: bytes, at: int, found: int) -> tuple[int, int]:
    """(end in ours, length) in bytes of the equal run around ours[at] and theirs[found]; both are at a token."""
    behind = num_common_tokens(memoryview(ours[at:]).cast("i"), memoryview(theirs[found:]).cast("i"))
    before = num_common_tokens(memoryview(ours[:at]).cast("i")[::-1], memoryview(theirs[:found]).cast("i")[::-1])
    return at + 4 * behind, 4 * (behind + before)
