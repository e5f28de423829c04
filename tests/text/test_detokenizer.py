"""Streamed text is the whole text, whatever the ids and however they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pagedcore.models.embedded import ensure_embedded_model
from pagedcore.text.detokenizer import Detokenizer
from pagedcore.text.tokenizer import Tokenizer, load_tokenizer
from support.small_tokenizers import make_byte_fallback, make_byte_level, make_metaspace, make_wordpiece

BROKEN = "\ufffd"
TEXTS = ("naïve café", "你好,世界", "สวัสดีชาวโลก", "👩‍👩‍👧 and 🤗🤗 ok", "mixed 文 é hello world\n\n  x", "")
KINDS: dict[str, Callable[[], Backend]] = {
    "byte_level": make_byte_level,
    "byte_fallback": make_byte_fallback,
    "byte_fallback_keeps_space": lambda: make_byte_fallback(strips_first_space=False),
    "metaspace": make_metaspace,
    "metaspace_never": lambda: make_metaspace("never"),
    "wordpiece": make_wordpiece,
}


def make_tokenizer(kind: str) -> Tokenizer:
    from pagedcore.text.chat_template import ChatTemplate

    return Tokenizer(KINDS[kind](), {}, ChatTemplate({}))


TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}


def stream(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
    """All deltas, the last one from finish()."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def one_by_one(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [(token_id,) for token_id in ids]


def ids_in_pieces(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    # A few ids beyond the vocabulary: padded embedding rows can be sampled.
    return st.lists(st.lists(st.integers(0, vocab_size + 3), max_size=4), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_decoded_whole_for_random_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = data.draw(ids_in_pieces(tokenizer.vocab_size))
    ids = [token_id for piece in pieces for token_id in piece]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, pieces, skip_special_tokens=skip)) == whole
    assert "".join(stream(tokenizer, one_by_one(ids), skip_special_tokens=skip)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "metaspace_never", "wordpiece"])
@given(data=st.data(), skip=st.booleans())
def test_decoding_is_what_the_tokenizers_library_decodes(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, backend = TOKENIZERS[kind], KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_keeps_space"])
@given(data=st.data(), skip=st.booleans())
def test_byte_fallback_decodes_as_the_library_does_unless_bytes_are_broken(kind: str, data: st.DataObject, skip: bool) -> None:
    """A run of byte tokens with one broken character is all U+FFFD for the library; here its whole characters are kept."""
    tokenizer, backend = TOKENIZERS[kind], KINDS[kind]()
    words = st.sampled_from(["hello", " my", "é", "文", "🤗", "\n", "ไทย", " ", "</s>"])
    whole = [backend.encode(word, add_special_tokens=False).ids for word in data.draw(st.lists(words, max_size=12))]
    stray = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4))
    ids = [token_id for piece in whole for token_id in piece] + stray
    expected = backend.decode(ids, skip_special_tokens=skip)
    if BROKEN not in expected:
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    else:
        assert BROKEN in tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_delta_of_valid_text_holds_a_broken_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    deltas = stream(tokenizer, one_by_one(tokenizer.encode(text, add_special_tokens=False)))
    assert "".join(deltas) == text
    assert not [delta for delta in deltas if BROKEN in delta]
    assert deltas[-1] == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_each_character_is_given_out_with_its_last_byte(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("🤗🤗", add_special_tokens=False)
    shown = ["".join(stream(tokenizer, one_by_one(ids[:n]))[:-1]) for n in range(len(ids) + 1)]
    assert shown[-1] == "🤗🤗"
    assert set(shown) == {"", "🤗", "🤗🤗"}


@pytest.mark.parametrize(("kind", "rest"), [("byte_level", BROKEN), ("byte_fallback", BROKEN * 3)])
def test_a_character_cut_by_the_end_is_broken_in_the_last_delta_only(kind: str, rest: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [token_id for char in "文🤗".encode() for token_id in [token_of_byte(tokenizer, char)]]
    deltas = stream(tokenizer, one_by_one(ids[:-1]))
    assert "".join(deltas[:-1]) == "文"
    assert deltas[-1] == rest


def token_of_byte(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_a_prompt_that_ends_inside_a_character_does_not_reach_the_output() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, *rest = (token_of_byte(tokenizer, byte) for byte in "é!".encode())
    prompt_text = tokenizer.decode([first])
    output = "".join(stream(tokenizer, one_by_one(rest)))
    assert prompt_text == BROKEN
    assert output == tokenizer.decode(rest) == f"{BROKEN}!"


def test_a_special_token_between_the_bytes_of_a_character_does_not_break_it() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second = (token_of_byte(tokenizer, byte) for byte in "é".encode())
    assert "".join(stream(tokenizer, one_by_one([first, 1, second]))) == "é"


def test_special_tokens_are_text_only_when_they_are_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [0, *tokenizer.encode("hello", add_special_tokens=False), 1]
    assert "".join(stream(tokenizer, one_by_one(ids))) == "hello"
    assert "".join(stream(tokenizer, one_by_one(ids), skip_special_tokens=False)) == "<s>hello</s>"


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [1, *tokenizer.encode("hello my world", add_special_tokens=False)]
    assert stream(tokenizer, one_by_one(ids)) == ["", "hello", " my", " world", ""]


def test_a_window_decoder_decodes_a_bounded_number_of_tokens_for_each_push(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("wordpiece")
    lengths: list[int] = []
    decode = tokenizer.decode

    def counting(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counting)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(500):
        detokenizer.push((4,))
    assert max(lengths) <= 9


@pytest.fixture(scope="module")
def real() -> tuple[Tokenizer, Backend]:
    folder: Path = ensure_embedded_model()
    return load_tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))


@pytest.mark.model
@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_the_real_tokenizer_streams_random_ids_as_the_library_decodes_them(
    real: tuple[Tokenizer, Backend], data: st.DataObject, skip: bool
) -> None:
    tokenizer, backend = real
    pieces = data.draw(ids_in_pieces(tokenizer.vocab_size))
    ids = [token_id for piece in pieces for token_id in piece]
    assert "".join(stream(tokenizer, pieces, skip_special_tokens=skip)) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@given(text=st.text(alphabet=st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=80))
@settings(deadline=None)
def test_the_real_tokenizer_gives_any_text_back_without_a_broken_delta(real: tuple[Tokenizer, Backend], text: str) -> None:
    tokenizer, _ = real  # its vocabulary lacks some bytes: those of planes 4 to 16 and of some control characters
    deltas = stream(tokenizer, one_by_one(tokenizer.encode(text)))
    assert "".join(deltas) == text
    assert all(BROKEN not in delta for delta in deltas) or BROKEN in text
