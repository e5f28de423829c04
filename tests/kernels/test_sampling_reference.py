"""Ordering of candidates and the masks on them."""

from __future__ import annotations

import torch

from pagedcore_kernels import order_candidates


def test_candidates_are_the_head_of_a_stable_sort_whatever_their_number() -> None:
    logits = (torch.randn(5, 700, generator=torch.Generator().manual_seed(0)) * 3).round()
    logits[0, ::7] = float("-inf")
    logits[1, 3], logits[1, 5] = 0.0, -0.0
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    for count in (1, 2, 64, 699, 700, 5000):
        some_values, some_ids = order_candidates(logits, count)
        assert torch.equal(some_ids, ids[:, :count])
        assert torch.equal(some_values, values[:, :count])
