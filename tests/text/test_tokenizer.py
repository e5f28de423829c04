"""The tokenizer: ids, special tokens, folders of other kinds, threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedcore.errors import CheckpointError, InvalidRequestError, ModelSourceError
from pagedcore.models.embedded import ensure_embedded_model
from pagedcore.text.tokenizer import load_tokenizer
from support.small_tokenizers import load_saved, make_byte_fallback, make_byte_level, make_wordpiece, save_folder


def test_special_tokens_are_added_as_the_post_processor_says(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=False) == "<s>hello"


def test_ids_of_special_tokens_come_from_the_configuration(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1}


def test_a_saved_truncation_or_padding_does_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    backend = make_byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8)
    tokenizer = load_saved(tmp_path, backend)
    assert len(tokenizer.encode("hello")) == 2
    assert len(tokenizer.encode("hello " * 10)) > 8


def test_token_text_and_bytes_show_one_token(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(second) == "é".encode()
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_text(0) == "<s>"
    (word,) = tokenizer.encode(" world", add_special_tokens=False)
    assert (tokenizer.token_text(word), tokenizer.token_bytes(word)) == (" world", b" world")


def test_the_word_mark_and_byte_tokens_are_shown_as_what_they_stand_for(tmp_path: Path) -> None:
    backend = make_byte_fallback()
    tokenizer = load_saved(tmp_path, backend)
    assert tokenizer.token_text(backend.token_to_id("▁world")) == " world"
    assert tokenizer.token_bytes(backend.token_to_id("<0xF0>")) == b"\xf0"


def test_one_token_of_a_decoder_that_looks_at_neighbours_is_shown_alone(tmp_path: Path) -> None:
    backend = make_wordpiece()
    tokenizer = load_saved(tmp_path, backend)
    assert tokenizer.token_bytes(backend.token_to_id("world")) == b"world"


def test_ids_without_a_token_add_nothing(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_numbers_that_are_no_ids_are_refused(tmp_path: Path, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"Token ids must be between .* got {token_id}"):
        load_saved(tmp_path, make_byte_level()).decode([3, token_id])


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        load_saved(tmp_path, make_byte_level()).encode("a\ud800")


def test_many_threads_get_the_same_ids_and_texts(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    texts = [f"hello world {i} 🤗 é" for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    fresh = load_tokenizer(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(fresh.encode, texts))
        assert ids == expected
        assert list(pool.map(fresh.decode, ids)) == texts


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer = load_saved(tmp_path, make_byte_level())
    is_done = threading.Event()
    started = threading.Event()
    num_turns = 0

    def count_turns() -> None:
        nonlocal num_turns
        started.set()
        while not is_done.is_set():
            num_turns += 1
            time.sleep(1e-4)  # gives the lock back

    thread = threading.Thread(target=count_turns)
    thread.start()
    started.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # the other thread gets its turns from a released lock only
    try:
        before = num_turns
        for _ in range(50):  # until the other thread had a core for its turns
            tokenizer.encode("hello world " * 20_000)
            if num_turns - before > 10:
                break
        after = num_turns
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        thread.join()
    assert after - before > 10


def test_loading_and_encoding_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    save_folder(tmp_path, make_byte_level())
    code = (
        "import sys; from pagedcore.text.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]); t.decode(t.encode('hello'));"
        "print([m for m in ('torch', 'transformers', 'jinja2', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_folder_with_vocabulary_and_merges_only_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    backend = make_byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hello world", add_special_tokens=False) == backend.encode("hello world", add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("hello 🤗")) == "hello 🤗"


def test_a_folder_without_tokenizer_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="pass tokenizer="):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    save_folder(tmp_path, make_byte_level())
    (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


@pytest.mark.model
def test_the_embedded_tokenizer_splits_digits_one_by_one_as_llama_cpp_does() -> None:
    tokenizer = load_tokenizer(ensure_embedded_model())
    text = "In 1984, pi=3.14159 and 2,048 tokens; it's 100% fine.  x\n\n12ab"
    # fmt: off
    assert tokenizer.encode(text) == [
        788, 216, 33, 41, 40, 36, 28, 16916, 45, 35, 30, 33, 36, 33, 37, 41, 284, 216, 34, 28, 32, 36, 40, 17837, 43, 357, 506, 216,
        33, 32, 32, 21, 4979, 30, 216, 1792, 1116, 33, 34, 369,
    ]
    # fmt: on
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_the_embedded_template_is_chatml_with_a_default_system_message() -> None:
    tokenizer = load_tokenizer(ensure_embedded_model())
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(tokenizer.eos_token_id) == 2
