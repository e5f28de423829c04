"""How far the next-token distributions of two models agree: pure arithmetic on their logits, position by position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.commands.comparison import Agreement
from pagedcore.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PositionScores:
    """One value a scored position, [n] each. A is the reference."""

    nll_a: Tensor
    """Minus the log probability of the text's next token, in nats."""
    nll_b: Tensor
    kl: Tensor
    """KL(A || B) over the whole vocabulary, in nats."""
    same_top: Tensor
    """bool: the likeliest token is the same."""


def score_positions(logits_a: Tensor, logits_b: Tensor, targets: Tensor) -> PositionScores:
    """Of logits [n, V] and the ids [n] that follow them, in float32: sum over v of p_a(v) (log p_a(v) - log p_b(v)), not below 0."""
    log_a, log_b = (logits.float().log_softmax(-1) for logits in (logits_a, logits_b))
    index = targets[:, None]
    nll_a, nll_b = (-log_p.gather(-1, index)[:, 0] for log_p in (log_a, log_b))
    same_top = log_a.argmax(-1) == log_b.argmax(-1)
    surplus = log_b.neg_().add_(log_a)  # in place, like the next line: a row is as wide as the vocabulary
    kl = surplus.mul_(log_a.exp_()).sum(-1).clamp_(min=0.0)
    return PositionScores(nll_a=nll_a, nll_b=nll_b, kl=kl, same_top=same_top)


class AgreementTally:
    """Owns the scores of the positions so far: four small numbers a token, on the host."""

    def __init__(self) -> None:
        self._scores: list[PositionScores] = []

    def add(self, scores: PositionScores) -> None:
        """Take in one chunk."""
        self._scores.append(PositionScores(scores.nll_a.cpu(), scores.nll_b.cpu(), scores.kl.cpu(), scores.same_top.cpu()))

    def result(self) -> Agreement:
        """Over all positions, of which there must be one. Raises `EngineError` for logits that are not finite."""
        import torch

        nll_a, nll_b, kl, same_top = (
            torch.cat([getattr(scores, name) for scores in self._scores]).double() for name in ("nll_a", "nll_b", "kl", "same_top")
        )
        for name, values in (("A", nll_a), ("B", nll_b), ("A or B", kl)):
            _require_finite(name, values)
        return Agreement(
            num_scored_tokens=len(kl),
            mean_nll_a_nats=nll_a.mean().item(),
            mean_nll_b_nats=nll_b.mean().item(),
            mean_kl_nats=kl.mean().item(),
            p99_kl_nats=kl.kthvalue(math.ceil(0.99 * len(kl))).values.item(),
            top1_fraction=same_top.mean().item(),
        )


def _require_finite(name: str, scores: Tensor) -> None:
    num_bad = int((~scores.isfinite()).sum())
    if num_bad:
        raise EngineError(
            f"The logits of {name} are not finite at {num_bad} of {len(scores)} positions: its dtype overflows, or its weights are broken; "
            "try dtype bfloat16 or float32."
        )
