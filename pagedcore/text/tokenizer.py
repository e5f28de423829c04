"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore.errors import CheckpointError, InvalidRequestError, MissingExtraError, ModelSourceError
from pagedcore.extras import pip_command
from pagedcore.json_file import read_json_object
from pagedcore.text.chat_template import ChatTemplate, load_chat_template
from pagedcore.text.cuts import PART_CHARS, has_cuts, parts_of
from pagedcore.text.detokenizer import Detokenizer
from pagedcore.text.pieces import Pieces, piece_rules

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_TOKEN_ID = 2**32 - 1
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Owns one loaded tokenizer and its chat template; nothing in it changes after loading, so threads may share it."""

    def __init__(self, backend: Backend, special_tokens: dict[str, str], template: ChatTemplate) -> None:
        self._backend = backend
        self._template = template
        self._special_tokens = special_tokens
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """Ids that `skip_special_tokens` leaves out of the text."""
        rules = piece_rules(backend)
        self.pieces = None if rules is None else Pieces(backend, rules)
        """What each token adds to a text; None when the decoder does not work token by token."""
        self._may_cut = has_cuts(backend)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    def to_json(self) -> str:
        """The text of a tokenizer.json that means the same."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the tokenizer's post-processor adds.

        Other threads run meanwhile. A long text that can be cut is left as soon as it has more than `max_prompt_tokens`: the engine
        refuses what it gets, and counts that. Raises `InvalidRequestError` for text that is not valid Unicode.
        """
        if len(text) <= PART_CHARS or not self._may_cut:
            return self._encode(text, add_special_tokens)
        before, after = self._added_around if add_special_tokens else ([], [])
        token_ids = list(before)
        for part in parts_of(text):
            token_ids += self._encode(part, add_special_tokens=False)
            if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
                break
        return token_ids + after

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # The batch call, unlike the single one, releases the interpreter's lock.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequestError(
                f"The prompt must be valid Unicode text, got {text[:40]!a} (a lone surrogate cannot be encoded).", param="prompt"
            ) from None

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """What the post-processor adds before and after a text."""
        plain = self._encode("a", add_special_tokens=False)
        around = self._encode("a", add_special_tokens=True)
        start = next(at for at in range(len(around)) if around[at : at + len(plain)] == plain)
        return around[:start], around[start + len(plain) :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all these tokens; ids that the tokenizer does not have add nothing.

        Raises `InvalidRequestError` for ids that are no ids.
        """
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id <= _MAX_TOKEN_ID), None)
        if wrong is not None:
            raise InvalidRequestError(f"Token ids must be between 0 and {self.vocab_size - 1}, got {wrong}.", param="tokens")
        if self.pieces is None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """The prompt of a conversation. Encode it with `add_special_tokens=False`: the template writes its own.

        Raises `InvalidRequestError` without a template, or when it refuses the messages.
        """
        return self._template.render(messages, self._special_tokens, template_kwargs)

    def compile_templates(self) -> None:
        """Compile the chat templates, for which the first conversation would wait a tenth of a second."""
        self._template.compile()

    def chat_template(self, *, with_tools: bool) -> str | None:
        """The text of the template, which for conversations with tools may be another one; None where there is none."""
        return self._template.source(with_tools=with_tools)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if self.pieces is not None:
            return self.pieces.get(token_id)
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(tokenizer_dir: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load a folder's tokenizer; `chat_template` is Jinja text, or a file of it, that replaces the folder's.

    Raises `ModelSourceError` when there is none, `CheckpointError` when its files cannot be read.
    """
    folder = Path(tokenizer_dir)
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    backend = _load_backend(folder)
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, _special_tokens(config), load_chat_template(folder, config, chat_template))


def _load_backend(folder: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_with_transformers(folder)
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception, whatever is wrong with the file
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error


def _convert_with_transformers(folder: Path) -> Backend:
    """Other tokenizer files (sentencepiece, tiktoken, vocab.json with merges.txt), turned by transformers."""
    if not any(any(folder.glob(pattern)) for pattern in ("*.model", "vocab.json", "*.tiktoken")):
        raise ModelSourceError(f"{folder} holds no tokenizer.json; pass tokenizer= a folder or name that has one.")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"{folder} holds no tokenizer.json, and what converts its files is not here: {pip_command('transformers')}."
        ) from error
    remedy = "pass tokenizer= a folder or name that has a tokenizer.json"
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, ImportError, KeyError, AttributeError) as error:
        raise CheckpointError(f"The tokenizer files of {folder} cannot be converted ({error}); {remedy}.") from error
    backend: Backend | None = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"The tokenizer of {folder} exists in Python only; {remedy}.")
    return backend


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Name to token, as templates see them."""
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    extra = config.get("additional_special_tokens") or []
    return tokens | ({"additional_special_tokens": [_token_text(token) for token in extra]} if extra else {})


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
