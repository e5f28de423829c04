"""What `pagedcore compare` finds out, as data and as JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Over all scored positions of a text; A is the reference."""

    num_scored_tokens: int
    mean_nll_a_nats: float
    """Mean of minus the log probability of the text's tokens; perplexity is its exponential."""
    mean_nll_b_nats: float
    mean_kl_nats: float
    """KL(A || B) over the whole vocabulary."""
    p99_kl_nats: float
    """The smallest value that is not exceeded at 99 % of the positions."""
    top1_fraction: float
    """Share of positions where A and B have the same likeliest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScope:
    """What was scored."""

    num_text_tokens: int
    num_windows: int
    window_tokens: int
    """Each window starts with an empty cache; its first token is not scored."""
    vocab_size: int
    """Logits of one position that are compared."""
    num_left_out_logits: int
    """Rows of the larger model beyond those of the smaller, which no token of the tokenizer has; 0 where both are of one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedScope:
    """What was asked for the speed: all prompts at once, greedy, in several rounds from an empty prefix cache."""

    num_prompts: int
    prompt_tokens: int
    """Of each, as the next."""
    output_tokens: int
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficScope:
    """What was asked with a traffic file: in its order, greedy."""

    num_requests: int
    num_prompt_tokens: int
    """Of all requests together."""
    output_tokens: int
    """Of each."""
    concurrency: int
    """Requests in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficReport:
    """One model on the requests of the traffic file, its prefix cache empty at first."""

    page_hit_rate: float
    """NaN, null in JSON, where nothing was looked up; the next two too."""
    prefix_hit_rate: float
    pool_hit_rate: float
    kv_cache_bytes: int
    num_blocks: int
    pool_tokens: int
    """Tokens that the KV pool holds."""
    output_tokens_per_s: float
    first_token_p50_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """One of the two models."""

    model: str
    quantization: str | None
    """As the checkpoint stores its matrices; None is unquantized."""
    linear_backend: str
    """What multiplies with them."""
    device: str
    dtype: str
    perplexity: float
    """Infinite, null in JSON, where the exponential is no float."""
    checkpoint_bytes: int
    """Weight files on disk; 0 for dummy weights."""
    weight_bytes: int
    """In the device's memory."""
    output_tokens_per_s: float
    """Of the median round, as `first_token_p50_s`."""
    slowest_output_tokens_per_s: float
    """Of the slowest round, as the next of the fastest."""
    fastest_output_tokens_per_s: float
    first_token_p50_s: float
    traffic: TrafficReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same text, prompts and requests. A is the reference."""

    a: ModelReport
    b: ModelReport
    agreement: Agreement
    text: TextScope
    speed: SpeedScope
    traffic: TrafficScope | None

    def relative(self, name: str) -> float | None:
        """B's number over A's for a field of `ModelReport`; None where A's is 0."""
        return ratio(getattr(self.b, name), getattr(self.a, name))

    def speeds_overlap(self) -> bool:
        """Whether the ranges from the slowest to the fastest round of A and of B have a speed in common."""
        a, b = self.a, self.b
        slowest = max(a.slowest_output_tokens_per_s, b.slowest_output_tokens_per_s)
        return slowest <= min(a.fastest_output_tokens_per_s, b.fastest_output_tokens_per_s)

    def as_json(self) -> dict[str, Any]:
        """The fields of this class and of those it holds, under their own names, and `relative`: B over A.

        Numbers that are not finite are None.
        """
        names = ("perplexity", "checkpoint_bytes", "weight_bytes", "output_tokens_per_s", "first_token_p50_s")
        fields: dict[str, Any] = _finite({**dataclasses.asdict(self), "relative": {name: self.relative(name) for name in names}})
        return fields


def perplexity(mean_nll_nats: float) -> float:
    """exp of the mean; infinite where that is no float."""
    try:
        return math.exp(mean_nll_nats)
    except OverflowError:
        return math.inf


def ratio(b: float, a: float) -> float | None:
    """b / a, or None where a is 0."""
    return b / a if a else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
