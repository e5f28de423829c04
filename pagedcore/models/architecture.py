"""The shape of a decoder, read from config.json. No torch here: a front process may read it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.batch import KVLayout
from pagedcore.errors import CheckpointError
from pagedcore.models.rope_parameters import RopeParameters

_ACTIVATIONS = ("silu", "swish")
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model class of transformers fixes in code, and the defaults of its config class."""

    model_type: str
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    window_of_every_layer: bool = False
    """`sliding_window` alone decides; otherwise `use_sliding_window` and `max_window_layers` or `layer_types` do."""
    has_window: bool = True
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", reads_attention_bias=True, reads_mlp_bias=True, has_window=False, max_position_embeddings=2048
    ),
    "MistralForCausalLM": Family(model_type="mistral", window_of_every_layer=True, num_kv_heads=8, max_position_embeddings=131072),
    "Qwen2ForCausalLM": Family(model_type="qwen2", always_qkv_bias=True, num_kv_heads=32, max_position_embeddings=32768),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3", reads_attention_bias=True, qk_norm=True, num_kv_heads=32, head_dim=128, max_position_embeddings=32768
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """All that a decoder's arithmetic depends on, beside its weights."""

    name: str
    """Class name of config.json's `architectures`."""
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """One a layer, in tokens; None attends to everything."""
    max_position_embeddings: int
    dtype: str | None
    """Dtype of the weights as config.json says; None if it does not."""
    eos_token_ids: frozenset[int]
    """Tokens that end an answer."""
    initializer_range: float

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelArchitecture:
        """Read config.json (and generation_config.json). Raises `CheckpointError` for what is missing or not covered."""
        name, family = _family(config)
        _check_activation(config)
        hidden_size = _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_layers = _positive(config, "num_hidden_layers")
        head_dim = _head_dim(config, family, hidden_size, num_heads)
        max_position_embeddings = _positive(config, "max_position_embeddings", family.max_position_embeddings)
        attention_bias = family.reads_attention_bias and bool(config.get("attention_bias", False))
        return cls(
            name=name,
            model_type=family.model_type,
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, family, num_heads),
            head_dim=head_dim,
            vocab_size=_positive(config, "vocab_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeParameters.from_config_dict(config, max_position_embeddings=max_position_embeddings, head_dim=head_dim),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.always_qkv_bias or attention_bias,
            out_bias=attention_bias,
            mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(config, family, num_layers),
            max_position_embeddings=max_position_embeddings,
            dtype=_dtype(config),
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            initializer_range=float(config.get("initializer_range", 0.02)),
        )

    @property
    def num_layer_parameters(self) -> int:
        """Of all layers, without biases, embeddings and head."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, in tokens, that the model was made for."""
        return self.rope.max_sequence_tokens

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    names = config.get("architectures") or [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    asked = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise CheckpointError(f"config.json asks for {asked}, which is not covered. Covered: {', '.join(FAMILIES)}.")


def _check_activation(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act is {activation!r} in config.json, which is not covered. Covered: {', '.join(_ACTIVATIONS)}.")


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key} is {value!r} in config.json and must be an integer of at least 1.")
    return value


def _head_dim(config: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    head_dim = config.get("head_dim", family.head_dim) or hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim} and must be even, because rotary embeddings turn pairs.")
    return int(head_dim)


def _num_kv_heads(config: Mapping[str, Any], family: Family, num_heads: int) -> int:
    num_kv_heads = config.get("num_key_value_heads", family.num_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(f"num_attention_heads is {num_heads} and must be a multiple of num_key_value_heads, which is {num_kv_heads}.")
    return int(num_kv_heads)


def _sliding_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    if not family.has_window:
        return (None,) * num_layers
    window = config.get("sliding_window", 4096)
    if family.window_of_every_layer:
        _refuse_mixed_layers(config)
        return (window,) * num_layers
    if not config.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    return tuple(window if slides else None for slides in _sliding_layers(config, num_layers))


def _sliding_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return [layer >= first for layer in range(num_layers)]
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types in config.json must name full_attention or sliding_attention for each of {num_layers} layers.")
    return [kind == "sliding_attention" for kind in layer_types]


def _refuse_mixed_layers(config: Mapping[str, Any]) -> None:
    if len(set(config.get("layer_types") or ())) > 1:
        raise CheckpointError("config.json mixes layer_types in a model class whose layers are all alike; that is not covered.")


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"dtype is {name!r} in config.json, which is not covered. Covered: {', '.join(_DTYPES)}.")
    return name


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Those of generation_config.json; where it names none, those of config.json."""
    named = generation_config.get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    ids = [] if named is None else [named] if isinstance(named, int) else named
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"eos_token_id is {named!r} and must be a token id or a list of token ids.")
    return frozenset(ids)
