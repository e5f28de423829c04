"""The CPU workloads, as token ids from fixed seeds: the same for every engine."""

from __future__ import annotations

import random

VOCAB = 49_152
FIRST_PLAIN_ID = 17
"""Ids below are SmolLM2's special tokens."""

Work = list[tuple[list[int], int]]
"""(prompt token ids, tokens to generate) a request."""


def batch_of_16(num_output_tokens: int = 64) -> Work:
    """16 requests of 88 to 244 prompt tokens, all at t = 0."""
    draw = random.Random(0)
    return [([draw.randrange(FIRST_PLAIN_ID, VOCAB) for _ in range(draw.randint(88, 244))], num_output_tokens) for _ in range(16)]


def exponential_lengths(num_requests: int = 256, mean: int = 64, cap: int = 512, num_prompt_tokens: int = 32) -> Work:
    """Output lengths exponential with the given mean and cap, seed 0: what continuous batching is for."""
    draw = random.Random(0)
    return [
        (
            [draw.randrange(FIRST_PLAIN_ID, VOCAB) for _ in range(num_prompt_tokens)],
            min(cap, max(1, round(draw.expovariate(1.0 / mean)))),
        )
        for _ in range(num_requests)
    ]
