"""Short keys of prompt prefixes: equal keys mean equal tokens from the start, in the same domain."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from pagedcore.core.block_hash import Domain

KEY_BITS = 32
KEY_SPACE = 1 << KEY_BITS
"""The lower bits of a key are those of its CRC, the upper ones its place in the prompt."""

MAX_ENDS = 8192
"""Places where prompts ended that are remembered."""

MAX_ENDS_A_PLACE = 16

_MIX = 0x9E3779B1
"""Odd, so that multiplying by it maps no two CRCs to one value; it spreads their bits, by which blocks are sampled."""


@dataclass(frozen=True, slots=True)
class _PromptEnd:
    """A served prompt, and how far its tokens reached with those that were generated."""

    num_prompt_tokens: int
    num_stored_tokens: int
    answer_seed: int


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a prompt's prefixes of `granule`, 2 x `granule`, ... tokens."""

    num_tokens: int
    keys: list[int]
    seed: int
    """The CRC of the whole prompt."""

    def answer_seed(self, request_id: str | None) -> int:
        """What the keys of generated tokens are made of: those of one request, or for None of all with this prompt."""
        return self.seed if request_id is None else crc32(request_id.encode("utf-8", "surrogatepass"), self.seed)


class PrefixKeys:
    """Owns the ends of the prompts served lately; turns token ids into keys.

    One chain of CRCs over pieces of `granule` tokens names the blocks of every block size that is a multiple of it: a
    block is its whole prefix. Two prefixes of one length have the same key with a chance of 2^-32: enough for statistics,
    and some 20 times cheaper than the hashes that decide what is shared.

    The ids of generated tokens are not needed: a prompt that begins with all of an earlier prompt is taken for the next
    turn of that conversation, and what follows for its answer.
    """

    def __init__(self, granule: int) -> None:
        self.granule = granule
        self._ends: OrderedDict[int, dict[int, _PromptEnd]] = OrderedDict()

    def keys_of(self, domain: Domain, token_ids: Sequence[int]) -> PromptKeys:
        """The keys of a prompt. Changes nothing."""
        data = array("i", token_ids).tobytes()
        step, crc = 4 * self.granule, crc32(domain)
        crcs = list[int]()
        end = len(data) // step * step
        for start in range(0, end, step):
            crc = crc32(data[start : start + step], crc)
            crcs.append(crc)
        keys = [place | crc * _MIX % KEY_SPACE for place, crc in zip(range(0, len(crcs) << KEY_BITS, KEY_SPACE), crcs, strict=True)]
        if not self._ends.keys().isdisjoint(keys):
            self._name_answers(keys, data, crcs)
        return PromptKeys(len(token_ids), keys, crc32(data[end:], crc))

    def answer_keys(self, prompt: PromptKeys, answer_seed: int, num_stored_tokens: int) -> list[int]:
        """The keys of what was generated behind a prompt, up to the last whole granule of `num_stored_tokens`."""
        return [_answer_key(answer_seed, index) for index in range(len(prompt.keys), num_stored_tokens // self.granule)]

    def remember(self, prompt: PromptKeys, answer_seed: int, num_stored_tokens: int) -> None:
        """Let later prompts go on behind this one. Prompts shorter than a granule are not remembered."""
        if not prompt.keys:
            return
        place = prompt.keys[-1]
        ends = self._ends.setdefault(place, {})
        self._ends.move_to_end(place)
        ends.pop(prompt.seed, None)
        ends[prompt.seed] = _PromptEnd(prompt.num_tokens, num_stored_tokens, answer_seed)
        if len(ends) > MAX_ENDS_A_PLACE:
            del ends[next(iter(ends))]
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def _name_answers(self, keys: list[int], data: bytes, crcs: list[int]) -> None:
        """Give the prefixes behind the ends of earlier prompts the keys that they got when they were generated."""
        for index, crc in enumerate(crcs):
            for seed, end in self._ends.get(keys[index], _NO_ENDS).items():
                tail = data[4 * (index + 1) * self.granule : 4 * end.num_prompt_tokens]
                if 4 * end.num_prompt_tokens <= len(data) and crc32(tail, crc) == seed:
                    for later in range(index + 1, min(end.num_stored_tokens // self.granule, len(keys))):
                        keys[later] = _answer_key(end.answer_seed, later)


_NO_ENDS: dict[int, _PromptEnd] = {}


def _answer_key(answer_seed: int, index: int) -> int:
    return 1 << 62 | index << KEY_BITS | crc32(index.to_bytes(4, "little"), answer_seed) * _MIX % KEY_SPACE
