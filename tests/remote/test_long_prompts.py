"""A prompt of many tokens on its way to an engine in another process: whole, and packed by no thread that others wait for."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from pagedcore.async_engine import AsyncEngine
from pagedcore.long_lists import PIECE_LENGTH
from pagedcore.messages import AddRequest
from pagedcore.remote import long_prompts
from pagedcore.remote.frames import Add, decode_from_front, encode
from pagedcore.remote.long_prompts import UnpackedAdd, encoded, request_of
from pagedcore.sampling_params import SamplingParams
from support.core_builders import make_request
from support.engine_builder import expected_tokens
from support.fake_runner import VOCAB_SIZE
from support.remote_engines import Hosted, connected, greeted, raw_front, run

LENGTH = 2 * PIECE_LENGTH + 5
PROMPT = [number % VOCAB_SIZE for number in range(LENGTH)]


def sent(message: bytes | UnpackedAdd) -> AddRequest:
    frame = decode_from_front(message if isinstance(message, bytes) else message.frame())
    assert isinstance(frame, Add)
    return request_of(frame)


@pytest.mark.parametrize("length", [0, 1, PIECE_LENGTH, PIECE_LENGTH + 1, 2 * PIECE_LENGTH, 3 * PIECE_LENGTH - 1])
def test_a_request_arrives_whole_whatever_its_length(length: int) -> None:
    request = make_request("a", [2**31 - 1 - number for number in range(length)], tenant="red", stop=())
    message = encoded(request)
    assert isinstance(message, UnpackedAdd) == (length > PIECE_LENGTH)
    assert sent(message) == request


@pytest.mark.parametrize("piece", [["a"], [1.5], "abc", None, {}])
def test_a_piece_that_is_none_is_no_message(piece: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        sent(encode(Add(make_request("a", []), [msgspec.Raw(encode([1])), msgspec.Raw(encode(piece))])))


def test_a_front_that_sends_such_a_piece_is_cut_off_and_the_others_go_on(one: Hosted) -> None:
    channel = greeted(raw_front(one))
    channel.put(Add(make_request("a", []), [msgspec.Raw(encode(["a"]))]))
    assert channel.read() is None
    channel.close()
    with connected(one) as front:
        assert run(front, [1, 2]).status == "completed"


def test_no_call_sees_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    unpacked: list[int] = []

    def note_packed(value: object) -> bytes:
        packed.append(len(value) if isinstance(value, list) else 0)
        return encode(value)

    def note_unpacked(piece: msgspec.Raw) -> list[int]:
        unpacked.append(len(unpack(piece)))
        return unpack(piece)

    unpack = long_prompts._unpack
    monkeypatch.setattr(long_prompts, "encode", note_packed)
    monkeypatch.setattr(long_prompts, "_unpack", note_unpacked)
    assert sent(encoded(make_request("a", PROMPT))).prompt_token_ids == PROMPT
    assert packed == [0, PIECE_LENGTH, PIECE_LENGTH, 5, 0], "the request without it, its pieces, and the message"
    assert unpacked == [PIECE_LENGTH, PIECE_LENGTH, 5]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_the_event_loop_of_a_front_packs_no_long_prompt(monkeypatch: pytest.MonkeyPatch, one: Hosted, num_choices: int) -> None:
    threads: list[str] = []
    lists: list[int] = []

    class Noting(UnpackedAdd):
        def frame(self) -> bytes:
            threads.append(threading.current_thread().name)
            return super().frame()

    def note_lists(value: Add) -> bytes:
        if isinstance(value, Add) and isinstance(value.request, AddRequest):
            lists.append(len(value.request.prompt_token_ids))
        return encode(value)

    prompt = PROMPT[:200]
    monkeypatch.setattr(long_prompts, "PIECE_LENGTH", 64)
    monkeypatch.setattr(long_prompts, "UnpackedAdd", Noting)
    monkeypatch.setattr(long_prompts, "encode", note_lists)

    async def ask(front: AsyncEngine) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=3, n=num_choices)
        *_, last = [output async for output in front.generate(prompt, params)]
        return last.outputs[-1].token_ids

    with connected(one) as front:
        assert asyncio.run(ask(front)) == expected_tokens(prompt, 3)
    assert threads == ["pagedcore-to-engine"] * num_choices
    assert lists == []
