"""Checks that the sampling kernel takes the token that the reference takes, save where the two are as good as tied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore_kernels import gumbel_noise
from pagedcore_kernels.reference.sample_tokens import GREEDY_TEMPERATURE, sample_tokens
from pagedcore_kernels.triton_ops import sampling
from pagedcore_kernels.triton_ops.sampling import SamplingLaunch

NEAR = 2e-5


@dataclass(frozen=True)
class RowSettings:
    """What one row asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    output_index: int = 0


def settings_tensors(rows: list[RowSettings], device: str = "cpu") -> dict[str, Tensor]:
    floats = {name: torch.tensor([getattr(row, name) for row in rows], device=device) for name in ("temperature", "top_p", "min_p")}
    return floats | {
        "top_k": torch.tensor([row.top_k for row in rows], dtype=torch.int32, device=device),
        "seeds": torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
        "output_indices": torch.tensor([row.output_index for row in rows], dtype=torch.int64, device=device),
    }


def check_draws(logits: Tensor, rows: list[RowSettings], launch: SamplingLaunch | None = None) -> int:
    """Every row's token is the reference's, or one that rounding could have made it. Returns how many rows were so close."""
    settings = settings_tensors(rows, str(logits.device))
    actual = sampling.sample_tokens(logits, **settings, launch=launch)
    expected = sample_tokens(logits, **settings)
    assert torch.equal(actual.status, expected.status)
    num_close = 0
    for index in (actual.token_ids != expected.token_ids).nonzero().view(-1).tolist():
        token = int(actual.token_ids[index])
        assert int(actual.status[index]) == 0, f"row {index} has no choice to make and still differs"
        assert _is_near_tie(logits[index], rows[index], token), (
            f"row {index}, {rows[index]}: token {token} instead of {int(expected.token_ids[index])}"
        )
        num_close += 1
    return num_close


def _is_near_tie(logits: Tensor, row: RowSettings, token: int) -> bool:
    """Whether `token` wins in fp64 once every kept token that is a hair from being dropped, or the reverse, may be either."""
    if row.temperature < GREEDY_TEMPERATURE or row.top_k == 1:
        return False
    scaled = logits.double() / row.temperature
    values, ids = torch.sort(scaled, descending=True, stable=True)
    surely, maybe = _heads(values, row)
    seeds, indices = torch.tensor([row.seed]), torch.tensor([row.output_index])
    noise = gumbel_noise(seeds.to(ids.device), indices.to(ids.device), ids[None, :].int())[0].double()
    noisy = values + noise
    place = int((ids == token).nonzero())
    if place >= maybe:
        return False
    best_sure = float(noisy[:surely].max())
    return float(noisy[place]) >= best_sure - NEAR * max(1.0, abs(best_sure))


def _heads(values: Tensor, row: RowSettings) -> tuple[int, int]:
    """How many tokens of the falling order are kept for sure, and how many may be."""
    counts = []
    for sign in (-1.0, 1.0):
        kept = values >= values[0] + (math.log(row.min_p) if row.min_p else -math.inf) - sign * NEAR
        if row.min_p == 0.0:
            kept[:] = True
        if row.top_k:
            kept[row.top_k :] = False
        mass = torch.where(kept, torch.exp(values - values[0]), 0.0)
        before = (mass.cumsum(0) - mass) / mass.sum()
        if row.top_p < 1.0:
            kept &= before < row.top_p + sign * NEAR
        kept[0] = True
        counts.append(int(kept.sum()))
    return counts[0], counts[1]
