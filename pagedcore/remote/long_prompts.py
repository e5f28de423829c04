"""Prompts of many tokens between a front and an engine in another process: packed and unpacked in pieces, and never on an event loop.

As one list in a message, a million token ids would hold the interpreter's lock for 20 ms on one side and for 100 ms on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from pagedcore.long_lists import PIECE_LENGTH, pieces
from pagedcore.messages import AddRequest
from pagedcore.remote.frames import Add, encode


@dataclass(frozen=True, slots=True)
class UnpackedAdd:
    """A request whose prompt is still to be packed, by the thread that sends it. The front has checked the ids."""

    head: bytes
    """The request without its prompt."""
    prompt: Sequence[int]

    def frame(self) -> bytes:
        """The encoded message."""
        packed = [msgspec.Raw(encode(piece)) for piece in pieces(self.prompt)]
        return encode(Add(cast(AddRequest, msgspec.Raw(self.head)), packed))


def encoded(request: AddRequest) -> bytes | UnpackedAdd:
    """What a channel is given to send. Raises what encoding raises."""
    if len(request.prompt_token_ids) <= PIECE_LENGTH:
        return encode(Add(request))
    return UnpackedAdd(encode(replace(request, prompt_token_ids=[])), request.prompt_token_ids)


def request_of(frame: Add) -> AddRequest:
    """The whole request again. Raises `msgspec.MsgspecError` for a piece that is none."""
    if not frame.long_prompt:
        return frame.request
    token_ids: list[int] = []
    for piece in frame.long_prompt:
        token_ids += _unpack(piece)
    return replace(frame.request, prompt_token_ids=token_ids)


_unpack = msgspec.msgpack.Decoder(list[int]).decode
