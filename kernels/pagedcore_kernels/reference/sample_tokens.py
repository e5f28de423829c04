"""One token a row from its logits: all steps after penalties, bias and masks, in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore_kernels.reference.sampling import gumbel_noise, keep_candidates, order_candidates

GREEDY_TEMPERATURE = 1e-5
"""Rows with a temperature below this take the largest logit."""

STATUS_OK = 0
STATUS_NOT_FINITE = 1
STATUS_ALL_MASKED = 2


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """N tokens, and whether each row's logits allowed a choice."""

    token_ids: Tensor  # [N] int64, below V whatever the status
    status: Tensor  # [N] int8: STATUS_OK, or why the token means nothing


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_indices: Tensor,
    may_draw: bool = True,
    is_masked: bool = False,
) -> DrawnTokens:
    """The largest logit of rows that are greedy, of others the largest of logit / temperature plus noise among the kept tokens.

    `logits` is [N, V] in any float dtype and stays as it is; a row is greedy with a temperature below GREEDY_TEMPERATURE or a top_k
    of 1, ties to the lowest id. min_p, then top_k (0 keeps all), then top_p keep tokens as `keep_candidates` does over all of V;
    `gumbel_noise(seeds, output_indices, token ids)` is added. Temperature, top_p and min_p are [N] fp32, the others [N] integers.

    `may_draw=False` promises that all rows are greedy. The status is STATUS_NOT_FINITE where a logit is NaN or the largest is
    infinite; with `is_masked` minus infinity throughout is STATUS_ALL_MASKED.
    """
    wide = logits.float()
    best, token_ids = wide.max(dim=-1)
    status = torch.zeros(logits.shape[0], dtype=torch.int8, device=logits.device).masked_fill_(~best.isfinite(), STATUS_NOT_FINITE)
    if is_masked:
        status.masked_fill_(best == -math.inf, STATUS_ALL_MASKED)
    draws = (temperature >= GREEDY_TEMPERATURE) & (top_k != 1) & (status == STATUS_OK)
    if may_draw:
        scaled = wide / temperature.clamp(min=GREEDY_TEMPERATURE)[:, None]
        values, ids = order_candidates(scaled, logits.shape[1])
        kept, _ = keep_candidates(values, min_p=min_p, top_k=top_k, top_p=top_p)
        noisy = values.masked_fill(~kept, -math.inf) + gumbel_noise(seeds, output_indices, ids)
        drawn = ids.gather(1, noisy.max(dim=-1, keepdim=True).indices).view(-1)
        token_ids = torch.where(draws, drawn, token_ids)
    return DrawnTokens(token_ids, status)
