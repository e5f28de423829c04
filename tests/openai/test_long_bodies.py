"""Large bodies are read in pieces, and mean what they mean when they are read in one."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore import long_lists
from pagedcore.errors import InvalidRequestError
from pagedcore.http import json_bodies, json_text
from pagedcore.openai import build_app
from pagedcore.openai.bodies import ChatBody, CompletionBody
from pagedcore.openai.parsing import parse_body
from support.fake_client import FakeClient

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(max_size=5), values | st.lists(st.integers(0, 50_000), max_size=30), max_size=4)
layouts = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 2}, {"ensure_ascii": False}])


def read_in_pieces(raw: bytes) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(json_text, "PIECE_BYTES", 8)
        return json_text.loads(raw)


@settings(max_examples=100, deadline=None)
@given(value=objects, layout=layouts)
def test_json_in_pieces_is_what_it_is_in_one(value: dict[str, Any], layout: dict[str, Any]) -> None:
    read = read_in_pieces(json.dumps(value, **layout).encode())
    assert repr(read) == repr(value)  # 2.0 equals 2, and 1 equals True


@settings(max_examples=100, deadline=None)
@given(value=objects, at=st.integers(0, 200), byte=st.sampled_from(b'",:[]{}\\x0-. '), layout=layouts)
def test_what_is_no_json_in_one_is_none_in_pieces(value: dict[str, Any], at: int, byte: int, layout: dict[str, Any]) -> None:
    raw = bytearray(json.dumps(value, **layout).encode())
    raw[at % len(raw)] = byte
    try:
        expected = msgspec.json.decode(bytes(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises(ValueError, match=r"\w"):
            read_in_pieces(bytes(raw))
    else:
        assert repr(read_in_pieces(bytes(raw))) == repr(expected)


def test_no_call_of_the_parser_sees_more_than_a_piece_of_a_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    parse = json_text._integers

    def noted(piece: bytes) -> list[int]:
        seen.append(len(piece))
        return parse(piece)

    monkeypatch.setattr(json_text, "_integers", noted)
    ids = list(range(100_000))
    assert json_text.loads(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    assert len(seen) > 5
    assert max(seen) < json_text.PIECE_BYTES + 20


NUM_LONG = 3 * long_lists.PIECE_LENGTH


@pytest.mark.parametrize("wrong", [-1, 2**31, True, "7", 1.0, None])
def test_a_wrong_token_id_at_the_end_of_a_long_prompt_is_refused_as_in_a_short_one(wrong: object) -> None:
    def message(ids: list[object]) -> str:
        with pytest.raises(InvalidRequestError) as refused:
            parse_body(CompletionBody, json.dumps({"prompt": ids}).encode())
        return str(refused.value).partition(", got")[0]

    assert message([1] * NUM_LONG + [wrong]) == message([1, wrong])


def test_a_wrong_message_at_the_end_of_many_is_refused() -> None:
    many: list[object] = [{"role": "user", "content": "hi"}] * NUM_LONG
    with pytest.raises(InvalidRequestError, match=rf"messages\[{NUM_LONG}\] is wrong: it should be a valid dictionary, got 'hi'"):
        parse_body(ChatBody, json.dumps({"messages": [*many, "hi"]}).encode())


def test_a_list_is_emptied_piece_by_piece() -> None:
    class Watched(list[int]):
        lengths: list[int] = []

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key)
            self.lengths.append(len(self))

    values = Watched(range(2 * long_lists.PIECE_LENGTH + 1))
    long_lists.discard(values)
    assert values == []
    assert Watched.lengths == [long_lists.PIECE_LENGTH + 1, 1, 0]


def test_right_ids_are_not_copied_by_the_check() -> None:
    ids = [1] * NUM_LONG
    assert CompletionBody.model_validate({"prompt": ids}).prompt is ids


LONG_BODIES = {
    "ids": ("/v1/completions", {"prompt": [97] * 20_000, "max_tokens": 1}),
    "text": ("/v1/completions", {"prompt": "a" * 40_000, "max_tokens": 1}),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 2_000, "max_tokens": 1}),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", LONG_BODIES)
async def test_a_large_body_is_parsed_and_checked_in_another_thread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    loads = json_bodies.loads

    def noted(raw: bytes) -> Any:
        threads.append(threading.get_ident())
        return loads(raw)

    monkeypatch.setattr(json_bodies, "loads", noted)
    path, body = LONG_BODIES[kind]
    transport = httpx.ASGITransport(app=build_app(FakeClient()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
