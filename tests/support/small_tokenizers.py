"""Small made-up tokenizers of each kind, and their folders on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedcore.text.tokenizer import Tokenizer as TextTokenizer
from pagedcore.text.tokenizer import load_tokenizer

SPECIAL = ("<s>", "</s>")
WORDS = ("hello", "world", "stop", "my", "bad", "or")
CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def make_byte_level() -> Tokenizer:
    """Byte-level BPE: 256 bytes, the words with and without a leading space, pieces of multi-byte characters, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = _merged([*SPECIAL, *alphabet], [*WORDS, "ðŁ", "ðŁĺ", "æĸ", "Ġà", "Ġà¸"], "Ġ")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer)
    tokenizer.add_tokens([AddedToken("<plain added>", normalized=False), AddedToken("好", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def make_byte_fallback(*, strips_first_space: bool = True) -> Tokenizer:
    """Sentencepiece BPE with byte fallback: words marked by U+2581, `<0xNN>` for what is not in the vocabulary."""
    letters = ["▁", *sorted(set("".join(WORDS)) | set(".,!0123456789")), "é", "文"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens, merges = _merged(["<unk>", *SPECIAL, *byte_tokens, *letters], [*WORDS, "▁▁"], "▁")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_first_space else steps)
    _add_special(tokenizer)
    return tokenizer


def make_metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """Words marked by U+2581 and a Metaspace decoder."""
    tokens = ["<unk>", *SPECIAL, "▁", "▁▁", *WORDS, *(f"▁{word}" for word in WORDS), "文", "or▁my"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    _add_special(tokenizer)
    return tokenizer


def make_wordpiece() -> Tokenizer:
    """A decoder that looks at neighbours: `##` joins to the word before, punctuation loses its space."""
    tokens = ["[UNK]", *SPECIAL, *WORDS, *(f"##{word}" for word in WORDS), ".", ",", "文"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    _add_special(tokenizer)
    return tokenizer


def save_folder(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A tokenizer folder: tokenizer.json, and tokenizer_config.json with `config` beside the special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load_saved(folder: Path, backend: Tokenizer, *, override: str | None = None, **config: Any) -> TextTokenizer:
    """The Tokenizer of pagedcore for a made-up one; `override` is the setting that replaces its chat template."""
    return load_tokenizer(save_folder(folder, backend, **config), override)


def _add_special(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])


def _merged(base: list[str], targets: list[str], mark: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The vocabulary, the merges that build each target from left to right, and then those that put a mark before each word."""
    pairs = [(target[: end - 1], target[end - 1 : end]) for target in targets for end in range(2, len(target) + 1)]
    merges = list(dict.fromkeys([*pairs, *((mark, word) for word in WORDS)]))
    return list(dict.fromkeys([*base, *(left + right for left, right in merges)])), merges
