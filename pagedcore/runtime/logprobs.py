"""Log probabilities of the raw model distribution, for sampled tokens and for prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.outputs import Logprob
from pagedcore_kernels import order_candidates

MAX_ELEMENTS = 1 << 23
"""Most logits that a pass over the vocabulary widens to fp32 at once."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """N tokens, each with the k likeliest alternatives at its position."""

    ids: Tensor  # [N, 1 + k] int64: the token, then the alternatives, likeliest first
    values: Tensor  # [N, 1 + k] fp32
    ranks: Tensor  # [N] int64, of the token; 1 is the likeliest, ties go to the lowest id

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.ids": self.ids, f"{prefix}.values": self.values, f"{prefix}.ranks": self.ranks}

    @classmethod
    def from_tensors(cls, prefix: str, tensors: dict[str, Tensor]) -> TokenLogprobs:
        return cls(tensors[f"{prefix}.ids"], tensors[f"{prefix}.values"], tensors[f"{prefix}.ranks"])

    def dicts(self, num_top: list[int]) -> list[dict[int, Logprob]]:
        """One dict a token: itself, and its `num_top[i]` alternatives."""
        rows = zip(self.ids.tolist(), self.values.tolist(), self.ranks.tolist(), num_top, strict=True)
        return [_token_dict(ids, values, rank, count) for ids, values, rank, count in rows]


def _token_dict(ids: list[int], values: list[float], rank: int, num_top: int) -> dict[int, Logprob]:
    entries = {ids[0]: Logprob(values[0], rank)}
    for position in range(1, num_top + 1):
        entries.setdefault(ids[position], Logprob(values[position], position))
    return entries


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Log softmax of `logits` [N, V] at `token_ids` [N] and at the `num_top` likeliest. Memory is bounded by `MAX_ELEMENTS`."""
    parts = [_some_logprobs(logits[rows], token_ids[rows], num_top) for rows in row_chunks(*logits.shape)]
    return TokenLogprobs(
        torch.cat([part.ids for part in parts]), torch.cat([part.values for part in parts]), torch.cat([part.ranks for part in parts])
    )


def row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cut rows so that each piece has at most `MAX_ELEMENTS` logits (or is one row)."""
    step = max(1, MAX_ELEMENTS // vocab_size)
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _some_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    logits = logits.float()
    num_top = min(num_top, logits.shape[1])
    own_ids = token_ids[:, None]
    own = logits.gather(1, own_ids)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    is_ahead = (logits > own) | ((logits == own) & (vocabulary < own_ids))
    values, ids = own, own_ids
    if num_top:
        top_values, top_ids = order_candidates(logits, num_top)
        values = torch.cat([own, top_values[:, :num_top]], dim=1)
        ids = torch.cat([own_ids, top_ids[:, :num_top]], dim=1)
    return TokenLogprobs(ids, values - torch.logsumexp(logits, dim=-1, keepdim=True), is_ahead.sum(dim=-1) + 1)
