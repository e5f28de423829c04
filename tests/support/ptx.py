"""The few PTX instructions that expand packed codes, computed in torch: assembly text can be checked where no GPU is."""

from __future__ import annotations

import re

import torch

Registers = dict[str, int]
"""32 bits each."""


def run_ptx(text: str, operands: list[int]) -> int:
    """Register $0 after the text, with `operands` in $1, $2 and so on. Fails for an instruction that is not known."""
    registers: Registers = {f"${index}": value for index, value in enumerate(operands, start=1)}
    for instruction in re.findall(r"[^;{}]+;", text):
        name, arguments = instruction.strip(" ;").split(maxsplit=1)
        if name == ".reg":
            continue
        target, *sources = (argument.strip() for argument in arguments.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = _RULES[name](*values) & 0xFFFFFFFF
    return registers["$0"]


def pair(values: list[float], dtype: torch.dtype) -> int:
    """Two 16-bit floats as one register, the first in its low half."""
    return int(torch.tensor(values, dtype=dtype).view(torch.int32).item()) & 0xFFFFFFFF


def single(value: float) -> int:
    return int(torch.tensor([value], dtype=torch.float32).view(torch.int32).item()) & 0xFFFFFFFF


def unpair(register: int, dtype: torch.dtype) -> torch.Tensor:
    """[2] float64."""
    return torch.tensor([_signed(register)], dtype=torch.int32).view(dtype).double()


def _signed(register: int) -> int:
    return register - (1 << 32) if register >= 1 << 31 else register


def _float(register: int) -> float:
    return float(torch.tensor([_signed(register)], dtype=torch.int32).view(torch.float32).item())


def _fma(dtype: torch.dtype):
    return lambda a, b, c: pair((unpair(a, dtype) * unpair(b, dtype) + unpair(c, dtype)).tolist(), dtype)


def _mul(dtype: torch.dtype):
    return lambda a, b: pair((unpair(a, dtype) * unpair(b, dtype)).tolist(), dtype)


def _add(dtype: torch.dtype):
    return lambda a, b: pair((unpair(a, dtype) + unpair(b, dtype)).tolist(), dtype)


def _prmt(a: int, b: int, selector: int) -> int:
    octets = [(a | b << 32) >> 8 * index & 255 for index in range(8)]
    return sum(octets[selector >> 4 * place & 7] << 8 * place for place in range(4))


def _lop3(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA, "only (a & b) | c is known"
    return a & b | c


_RULES = {
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, count: a >> count,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "add.f32": lambda a, b: single(_float(a) + _float(b)),
    "mul.f32": lambda a, b: single(_float(a) * _float(b)),
    "fma.rn.f16x2": _fma(torch.float16),
    "fma.rn.bf16x2": _fma(torch.bfloat16),
    "add.rn.f16x2": _add(torch.float16),
    "mul.rn.f16x2": _mul(torch.float16),
    "cvt.rn.f16x2.f32": lambda high, low: pair([_float(low), _float(high)], torch.float16),
    "cvt.rn.bf16x2.f32": lambda high, low: pair([_float(low), _float(high)], torch.bfloat16),
}
