"""Reads GGUF files: metadata, and tensors as fp32. Only what the embedded model needs (F32, F16, Q8_0, Q4_1)."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedcore.errors import CheckpointError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class _Encoding(NamedTuple):
    """How a tensor type packs its values: `block_bytes` bytes hold `block_values` values."""

    name: str
    block_values: int
    block_bytes: int


_ENCODINGS = {
    0: _Encoding("F32", 1, 4),
    1: _Encoding("F16", 1, 2),
    3: _Encoding("Q4_1", 32, 20),
    8: _Encoding("Q8_0", 32, 34),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is row-major: the last axis is the one that is packed in blocks."""

    name: str
    shape: tuple[int, ...]
    encoding: _Encoding
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.encoding.block_values * self.encoding.block_bytes


class _Cursor:
    """A position in the header. Raises `CheckpointError` past the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.offset = 0

    def take(self, count: int) -> memoryview:
        end = self.offset + count
        if end > len(self.data):
            raise CheckpointError(f"{self.path} ends at byte {len(self.data)} inside its header (byte {end} is needed); fetch it again.")
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} holds a metadata value of the unknown type {kind}.")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(kind) for _ in range(count)]


class GgufFile:
    """Owns the read-only mapping of one GGUF file. Raises `CheckpointError` when it is not one, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: Bytes = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        cursor = _Cursor(self._bytes.data, path)
        if bytes(cursor.take(4)) != _MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file.")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            tensor = _tensor_entry(cursor)
            self.tensors[tensor.name] = tensor
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-cursor.offset // alignment) * alignment

    def read(self, name: str) -> Floats:
        """The tensor in fp32."""
        tensor = self.tensors[name]
        start = self._data_start + tensor.offset_bytes
        packed = self._bytes[start : start + tensor.num_bytes]
        if packed.size != tensor.num_bytes:
            raise CheckpointError(f"{self.path} is cut short: tensor {name} needs {tensor.num_bytes} bytes and {packed.size} are there.")
        return _decode(packed, tensor.encoding).reshape(tensor.shape)


def _tensor_entry(cursor: _Cursor) -> GgufTensor:
    name = cursor.string()
    reversed_shape = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in _ENCODINGS:
        offered = ", ".join(e.name for e in _ENCODINGS.values())
        raise CheckpointError(f"{cursor.path}: tensor {name} has the GGML type {kind}; {offered} can be read.")
    return GgufTensor(name, tuple(reversed(reversed_shape)), _ENCODINGS[kind], offset)


def _decode(packed: Bytes, encoding: _Encoding) -> Floats:
    if encoding.name == "F32":
        return packed.view("<f4").astype(np.float32)
    if encoding.name == "F16":
        return packed.view("<f2").astype(np.float32)
    blocks = packed.reshape(-1, encoding.block_bytes)
    return _decode_q8_0(blocks) if encoding.name == "Q8_0" else _decode_q4_1(blocks)


def _halves(columns: Bytes) -> Floats:
    """Two bytes a block -> one fp16 value a block, as a column."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _decode_q8_0(blocks: Bytes) -> Floats:
    """value = scale * q; block: fp16 scale, 32 int8."""
    return _halves(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _decode_q4_1(blocks: Bytes) -> Floats:
    """value = scale * q + minimum; block: fp16 scale, fp16 minimum, 16 bytes: low nibbles are values 0-15, high ones 16-31."""
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return _halves(blocks[:, :2]) * quants.astype(np.float32) + _halves(blocks[:, 2:4])
