"""One of the two models that `pagedcore compare` sets side by side, and what both must share for numbers that mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.models.progress import Progress
from pagedcore.models.registry import read_architecture
from pagedcore.models.safetensors_index import INDEX_FILE, read_weight_map
from pagedcore.models.source import resolve_model
from pagedcore.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_WINDOW_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is known of one model before its weights are loaded."""

    label: str
    """A or B, for progress."""
    config: EngineConfig
    name: str
    """As the user knows the model."""
    model_dir: Path
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    """Logits of one position; rows beyond the tokenizer's tokens are padding."""

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weight files, those of the index where there is one; 0 for dummy weights."""
        return 0 if self.config.load_format == "dummy" else sum(path.stat().st_size for path in _weight_files(self.model_dir))


def open_side(label: str, config: EngineConfig, progress: Progress) -> Side:
    """Find the model's folder; read its config.json and its tokenizer. Raises what those raise, and `ConfigError` with no tokenizer."""
    if config.skip_tokenizer_init:
        raise ConfigError("A comparison reads a text and needs the tokenizers; leave out skip_tokenizer_init.")
    source = resolve_model(config, progress=progress)
    architecture = read_architecture(source.model_dir)
    limit, asked = architecture.max_model_len, config.max_model_len
    if asked != "auto" and asked > limit:
        raise ConfigError(f"max_model_len is {asked} and {source.name!r} was made for at most {limit} tokens; set at most that.")
    return Side(
        label=label,
        config=config,
        name=source.name,
        model_dir=source.model_dir,
        tokenizer=load_tokenizer(source.tokenizer_dir, chat_template=config.chat_template),
        max_model_len=limit if asked == "auto" else asked,
        vocab_size=architecture.vocab_size,
    )


def encode_text(a: Side, b: Side, text: str, max_text_tokens: int | None) -> list[int]:
    """The ids of a text, which both tokenizers must give.

    Raises `ConfigError` where they differ or where a model has no such ids, `InvalidRequestError` for fewer than 2 tokens.
    """
    ids_a, ids_b = (side.tokenizer.encode(text) for side in (a, b))
    if ids_a != ids_b:
        raise _other_ids(a, b, ids_a, ids_b)
    if max_text_tokens is not None and max_text_tokens < 2:
        raise ConfigError(f"max_text_tokens is {max_text_tokens} and must be at least 2: the first token of a text is not scored.")
    token_ids = ids_a[:max_text_tokens]
    if len(token_ids) < 2:
        raise InvalidRequestError(f"The text has {len(token_ids)} tokens and at least 2 are needed to score one.", param="text")
    shared = shared_vocab_size(a, b)
    if max(token_ids) >= shared:
        raise ConfigError(
            f"The tokenizer gives the id {max(token_ids)} and the models have logits for ids below {shared} only; "
            "is it another model's? Set tokenizer to the right one."
        )
    return token_ids


def shared_vocab_size(a: Side, b: Side) -> int:
    """How many logits of a position are compared: all, or those of the smaller model where the larger has more rows of padding only.

    Raises `ConfigError` where the larger one's further rows belong to tokens.
    """
    smaller = min(a.vocab_size, b.vocab_size)
    num_tokens = max(a.tokenizer.vocab_size, b.tokenizer.vocab_size)
    if a.vocab_size != b.vocab_size and num_tokens > smaller:
        raise ConfigError(
            f"A has logits for {a.vocab_size} tokens, B for {b.vocab_size}, and the tokenizer has {num_tokens}: the difference is more "
            "than padding, and distributions over different vocabularies cannot be compared."
        )
    return smaller


def window_size(a: Side, b: Side, window: int | None) -> int:
    """Tokens of a window. Raises `ConfigError` for one that a model cannot hold, or that scores nothing."""
    limit = min(a.max_model_len, b.max_model_len)
    if limit < 2:
        raise ConfigError(f"max_model_len is {limit} and must be at least 2 to compare models: the first token of a window is not scored.")
    if window is None:
        return min(DEFAULT_WINDOW_TOKENS, limit)
    if not 2 <= window <= limit:
        raise ConfigError(f"window is {window} and must be between 2 and {limit}, the smaller max_model_len of the two models.")
    return window


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.is_file():
        return list(model_dir.glob("*.safetensors"))
    return [model_dir / name for name in set(read_weight_map(index).values())]


def _other_ids(a: Side, b: Side, ids_a: Sequence[int], ids_b: Sequence[int]) -> ConfigError:
    index = next((i for i, (left, right) in enumerate(zip(ids_a, ids_b, strict=False)) if left != right), min(len(ids_a), len(ids_b)))
    return ConfigError(
        f"The tokenizers of {a.name!r} and {b.name!r} differ on this text, first at token {index} ({len(ids_a)} and {len(ids_b)} tokens "
        "in all): perplexities over different tokens cannot be compared. If the models share a tokenizer, pass it as tokenizer=."
    )
