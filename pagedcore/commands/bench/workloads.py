"""What is asked of an engine or a server: prompts of random token ids, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagedcore.commands.bench.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt, and how many tokens are generated for it whatever they are."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one round. The first `num_shared_tokens` of every prompt are the same; the others are each prompt's own.

    A prompt that is shorter is a part of what they share.
    """

    num_prompts: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    num_shared_tokens: int = 0
    seed: int | str = 0

    def requests(self, vocab_size: int) -> list[BenchRequest]:
        """The same ones for the same seed, of ids below `vocab_size`."""
        draw = random.Random(self.seed)
        shared = _random_ids(draw, self.num_shared_tokens, vocab_size)
        return [self._request(draw, shared, vocab_size) for _ in range(self.num_prompts)]

    def _request(self, draw: random.Random, shared: list[int], vocab_size: int) -> BenchRequest:
        length = self.prompt_tokens.draw(draw)
        own = _random_ids(draw, max(0, length - len(shared)), vocab_size)
        return BenchRequest(prompt=[*shared[:length], *own], num_output_tokens=self.output_tokens.draw(draw))


def _random_ids(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]
