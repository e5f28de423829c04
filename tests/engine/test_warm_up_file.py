"""A warm-up file: what it may hold, and that it is what clients will ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.warm_up import as_token_ids, read_warm_up_file
from support.fake_client import BOS, FakeText

SYSTEM = {"role": "system", "content": "Be brief."}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "warm-up"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_holds_one_text_a_line_or_a_json_list(tmp_path: Path) -> None:
    assert read_warm_up_file(write(tmp_path, "one\n\n  \ntwo\n")) == ["one", "two"]
    assert read_warm_up_file(write(tmp_path, ' ["one\\nmore", [{"role": "system", "content": "Be brief."}]]')) == ["one\nmore", [SYSTEM]]
    assert read_warm_up_file(write(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("content", "words"), [("[1]", "lists of messages"), ("[[]]", "lists of messages"), ("[", "not valid JSON"), (b"\xff", "not UTF-8")]
)
def test_what_is_neither_is_a_config_error(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_warm_up_file(write(tmp_path, content))


@pytest.mark.parametrize("line", ['{"a": 1}', '  {"prompt": "hi"} ', "{}", '["two"]', '[{"role": "user", "content": "hi"}]'])
def test_a_line_that_is_a_json_object_or_list_is_no_text(tmp_path: Path, line: str) -> None:
    """The empty line counts: the number is the one an editor shows."""
    path = write(tmp_path, f"one\n\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_warm_up_file(path)
    assert str(raised.value) == (
        f"Line 3 of the warm-up file {str(path)!r} is a JSON object or list; "
        "give a JSON list of texts and lists of messages, or one plain text a line."
    )


def test_a_line_that_only_looks_like_json_is_text(tmp_path: Path) -> None:
    lines = ["{braces} in a template", '{"a": 1} and more', "7", "null", '"quoted"', "[INST] hi"]
    assert read_warm_up_file(write(tmp_path, "\n".join(lines))) == lines


def test_lists_a_line_are_refused_with_what_to_give(tmp_path: Path) -> None:
    content = '[{"role": "user", "content": "one"}]\n[{"role": "user", "content": "two"}]\n'
    with pytest.raises(ConfigError, match=r"not valid JSON: Extra data: line 2 .*; give a JSON list of texts and lists of messages, or"):
        read_warm_up_file(write(tmp_path, content))


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_warm_up_file(tmp_path / "none")


def test_a_prompt_is_tokenized_as_a_clients_would_be_and_a_conversation_is_left_open_for_more() -> None:
    text = FakeText()
    assert as_token_ids("ab", text) == [BOS, 97, 98]
    prefix = as_token_ids([SYSTEM], text)
    whole = text.encode(text.render_chat([SYSTEM, {"role": "user", "content": "hi"}]), add_special_tokens=False)
    assert bytes(prefix) == b"<system>Be brief."
    assert whole[: len(prefix)] == prefix
    assert as_token_ids([{**SYSTEM, "role": "developer"}], text) == prefix, "as the server reads a client's"


def test_without_a_tokenizer_or_with_messages_that_the_template_refuses_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        as_token_ids("a", None)
    with pytest.raises(InvalidRequestError):
        as_token_ids([{"role": "user", "content": "refuse me"}], FakeText())
