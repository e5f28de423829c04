"""Rotary embedding: inverse frequencies of each kind, and the table of cosines and sines that a step reads.

An angle must depend on nothing but its position: cached keys are shared between requests of any length. Kinds that
change with the sequence's length (dynamic, longrope) are therefore fixed once, for sequences of `max_model_len` tokens;
up to the pretraining's length that is the unscaled embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.batch import Rotation
from pagedcore.models.rope_parameters import RopeParameters


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Radians a token for each pair of dimensions, and the factor on every cosine and sine."""

    inverse: Tensor  # [D / 2] float32
    scaling: float = 1.0


class RotaryTable:
    """Owns the cosines and sines of all positions below `max_model_len`. Read only after it is built."""

    def __init__(self, rope: RopeParameters, *, head_dim: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies = rope_frequencies(rope, head_dim=head_dim, max_model_len=max_model_len)
        positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
        angles = torch.outer(positions, frequencies.inverse.to(device))
        self._cos_sin = (torch.cat((angles.cos(), angles.sin()), dim=-1) * frequencies.scaling).to(dtype)  # [max_model_len, D]

    def at(self, positions: Tensor, *, eps: float = 0.0, gathers: bool = True) -> Rotation:
        """The rotation of tokens at int64 `positions` [T], without norms; with `gathers` their cosines and sines are looked up here."""
        cos, sin = self._cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1) if gathers else (None, None)
        return Rotation(cos_sin=self._cos_sin, positions=positions, cos=cos, sin=sin, query_norm=None, key_norm=None, eps=eps)

    @property
    def num_positions(self) -> int:
        return self._cos_sin.shape[0]


def rope_frequencies(rope: RopeParameters, *, head_dim: int, max_model_len: int) -> Frequencies:
    """Frequencies for sequences of up to `max_model_len` tokens."""
    return _KINDS[rope.kind](rope, head_dim, max_model_len)


def _wavelength_powers(theta: float, head_dim: int) -> Tensor:
    """theta ** (2 i / D), the inverse of each pair's frequency."""
    return theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _default(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    return Frequencies(1.0 / _wavelength_powers(rope.theta, head_dim))


def _linear(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    return Frequencies(1.0 / _wavelength_powers(rope.theta, head_dim) / rope.factor)


def _dynamic(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    stretch = max(max_model_len, rope.max_position_embeddings) / rope.max_position_embeddings
    theta = rope.theta * (rope.factor * stretch - (rope.factor - 1.0)) ** (head_dim / (head_dim - 2))
    return Frequencies(1.0 / _wavelength_powers(theta, head_dim))


def _llama3(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    """Waves longer than the pretraining / low_freq_factor are stretched, shorter than / high_freq_factor kept, between them blended."""
    inverse = 1.0 / _wavelength_powers(rope.theta, head_dim)
    turns = rope.original_max_position_embeddings / (2 * math.pi / inverse)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return Frequencies((1.0 - kept) * inverse / rope.factor + kept * inverse)


def _yarn(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    """Pairs that turn over beta_fast times in the pretraining's length are kept, under beta_slow times stretched, a ramp between."""
    powers = _wavelength_powers(rope.theta, head_dim)
    low, high = (_dimension_of_turns(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return Frequencies((1.0 - kept) / (rope.factor * powers) + kept / powers, _yarn_scaling(rope))


def _dimension_of_turns(rope: RopeParameters, head_dim: int, turns: float) -> float:
    """The pair, as a real number, whose wave turns this often in the pretraining's length."""
    return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_scaling(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(rope: RopeParameters, head_dim: int, max_model_len: int) -> Frequencies:
    original = rope.original_max_position_embeddings
    factors = torch.tensor(rope.long_factor if max_model_len > original else rope.short_factor, dtype=torch.float32)
    inverse = 1.0 / (factors * _wavelength_powers(rope.theta, head_dim))
    if rope.attention_factor is not None:
        return Frequencies(inverse, rope.attention_factor)
    return Frequencies(inverse, math.sqrt(1.0 + math.log(rope.factor) / math.log(original)) if rope.factor > 1.0 else 1.0)


_KINDS: dict[str, Callable[[RopeParameters, int, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
