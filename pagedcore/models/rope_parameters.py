"""The rotary settings of a checkpoint, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.errors import CheckpointError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
DEFAULT_THETA = 10_000.0
_OLD_NAMES = {"su": "longrope"}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_KNOWN_KEYS = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
        "partial_rotary_factor",
        "finetuned",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """How positions turn into angles. Fields that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Length of the pretraining, in tokens, before the scaling."""
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], *, max_position_embeddings: int, head_dim: int) -> RopeParameters:
        """Read config.json's keys. Raises `CheckpointError` for a kind or key that is not covered, or a missing number."""
        settings = _settings(config)
        kind = _kind(settings)
        original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
        original = int(original or max_position_embeddings)
        parameters = cls(
            kind=kind,
            theta=float(settings.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
            max_position_embeddings=max_position_embeddings,
            original_max_position_embeddings=original,
            factor=float(settings.get("factor") or max_position_embeddings / original),
            attention_factor=settings.get("attention_factor"),
            beta_fast=float(settings.get("beta_fast") or 32.0),
            beta_slow=float(settings.get("beta_slow") or 1.0),
            mscale=settings.get("mscale"),
            mscale_all_dim=settings.get("mscale_all_dim"),
            truncate=bool(settings.get("truncate", True)),
            low_freq_factor=float(settings.get("low_freq_factor") or 1.0),
            high_freq_factor=float(settings.get("high_freq_factor") or 4.0),
            short_factor=tuple(settings.get("short_factor") or ()),
            long_factor=tuple(settings.get("long_factor") or ()),
        )
        _check_factor_lists(parameters, head_dim)
        return parameters

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence that the settings promise: yarn counts from the pretraining's length."""
        if self.kind == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return self.max_position_embeddings


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"config.json has rotary settings for each layer type ({', '.join(nested)}); only one set for all layers is covered."
        )
    unknown = sorted(set(settings) - _KNOWN_KEYS)
    if unknown:
        raise CheckpointError(
            f"config.json has the rotary setting {unknown[0]!r}, which is not covered. Covered: {', '.join(sorted(_KNOWN_KEYS))}."
        )
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor is {partial!r} in config.json; only 1.0 (whole heads) is covered.")
    return settings


def _kind(settings: Mapping[str, Any]) -> str:
    name = settings.get("rope_type") or settings.get("type") or "default"
    kind = _OLD_NAMES.get(name, name)
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"rope_type is {name!r} in config.json, which is not covered. Covered: {', '.join(ROPE_KINDS)}.")
    for key in _REQUIRED.get(kind, ()):
        if settings.get(key) is None:
            raise CheckpointError(f"rope_type {kind!r} in config.json needs {key!r}, which is missing.")
    return kind


def _check_factor_lists(parameters: RopeParameters, head_dim: int) -> None:
    if parameters.kind != "longrope":
        return
    for name, factors in (("short_factor", parameters.short_factor), ("long_factor", parameters.long_factor)):
        if len(factors) != head_dim // 2:
            raise CheckpointError(f"{name} in config.json has {len(factors)} numbers and must have head_dim / 2 = {head_dim // 2}.")
