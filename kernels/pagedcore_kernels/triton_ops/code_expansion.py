"""The instructions that turn packed codes into numbers of a 16-bit float type, two at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedcore_kernels.triton_ops.attention_common import INTERPRETED
from pagedcore_kernels.triton_ops.dequantize import codes_of_slice, split_scale

_FLOAT32_UNIT = 2.0**23
"""Or-ed into the lowest bits of this float32, an integer of 8 bits is added to it."""
_FLOAT16_UNIT = 1024.0
"""The same of float16."""
_SCALE_UNIT = tl.constexpr(2.0**6)
"""Scales of 8-bit codes are multiplied by it before they become float16, and codes divided: one that is not a float16 number loses no bits
down to 2^-20. From a scale of 1023.5 on the products are infinite, and not a number where a code is the zero point: 64 codes from that a
weight is past the largest float16 number anyway."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Constants for a kernel: of each slice an assembly text, and what the number in the register is.

    The number is `code / factor + offset` before zero points are taken off by an operand that holds `-(offset + zero)`.
    """

    asm: tuple[str, ...] | None
    """None in the interpreter."""
    constraints: str
    offsets: tuple[float, ...]
    factors: tuple[float, ...]


def expand_raw(dtype: torch.dtype) -> Expansion:
    """4-bit codes with nothing taken off.

    float16: a code in the lowest bits is a subnormal number as it stands, code * 2^-24, and code * 2^-20 four bits further up.
    bfloat16 has seven bits below its exponent, and its subnormal numbers are too small: or-ed into the bits of 128, a code is
    128 + code, after a shift for each slice.
    """
    if INTERPRETED:
        return Expansion(None, "", (0.0,) * 4, (1.0,) * 4)
    if dtype == torch.bfloat16:
        asm = tuple(_asm(_masked(shift, "0x000F000F", "0x43004300"), "mov.b32 $0, t;") for shift in (0, 8, 4, 12))
        return Expansion(asm, "=r,r", (128.0,) * 4, (1.0,) * 4)
    places = ((0, "0x000F000F"), (8, "0x000F000F"), (0, "0x00F000F0"), (8, "0x00F000F0"))
    asm = tuple(_asm(_masked(shift, mask, "0"), "mov.b32 $0, t;") for shift, mask in places)
    return Expansion(asm, "=r,r", (0.0,) * 4, (2.0**24, 2.0**24, 2.0**20, 2.0**20))


def expand_less_zero(dtype: torch.dtype) -> Expansion:
    """8-bit codes less their zero points: exact in both types, in bfloat16 by way of float32."""
    if INTERPRETED:
        return Expansion(None, "", (0.0,) * 2, (1.0,) * 2)
    if dtype == torch.float16:
        asm = tuple(_asm(_halves(slice_index), "add.rn.f16x2 $0, t, $2;") for slice_index in (0, 1))
        return Expansion(asm, "=r,r,r", (_FLOAT16_UNIT,) * 2, (1.0,) * 2)
    asm = tuple(_asm(_wide(slice_index), _narrow(dtype)) for slice_index in (0, 1))
    return Expansion(asm, "=r,r,f,f", (_FLOAT32_UNIT,) * 2, (1.0,) * 2)


def expand_scaled(dtype: torch.dtype, bits: int) -> Expansion:
    """Whole weights: (code - zero) * scale, rounded to `dtype`.

    In `dtype`, where code - zero is exact (1024 + code, or 1024 + 16 code times 1/16, in float16; 128 + a code of 4 bits in bfloat16); a
    float16 scale is rounded, a bfloat16 one comes in two parts that hold 16 bits together. 8 bits in bfloat16: in float32.
    """
    if INTERPRETED:
        return Expansion(None, "", (0.0,) * (16 // bits), (1.0,) * (16 // bits))
    if bits == 8 and dtype == torch.float16:
        scaled = "mov.b32 f, 0x24002400; fma.rn.f16x2 t, t, f, $2; mul.rn.f16x2 $0, t, $3;"  # f: 1 / _SCALE_UNIT
        asm = tuple(_asm(_halves(slice_index), scaled) for slice_index in (0, 1))
        return Expansion(asm, "=r,r,r,r", (_FLOAT16_UNIT,) * 2, (1.0,) * 2)
    if bits == 8:
        scaled = "mul.f32 a, a, $4; mul.f32 b, b, $5; "
        asm = tuple(_asm(_wide(slice_index), scaled + _narrow(dtype)) for slice_index in (0, 1))
        return Expansion(asm, "=r,r,f,f,f,f", (_FLOAT32_UNIT,) * 2, (1.0,) * 2)
    if dtype == torch.bfloat16:
        less_zero = "mov.b32 f, 0x3F803F80; fma.rn.bf16x2 t, t, f, $2; "
        scaled = "mov.b32 f, 0x80008000; fma.rn.bf16x2 f, t, $4, f; fma.rn.bf16x2 $0, t, $3, f;"
        asm = tuple(_asm(_masked(shift, "0x000F000F", "0x43004300"), less_zero + scaled) for shift in (0, 8, 4, 12))
        return Expansion(asm, "=r,r,r,r,r", (128.0,) * 4, (1.0,) * 4)
    low, high = ("0x000F000F", "0x3C003C00"), ("0x00F000F0", "0x2C002C00")  # masks, and the factors 1 and 1/16
    places = ((0, *low), (8, *low), (0, *high), (8, *high))
    asm = tuple(
        _asm(_masked(shift, mask, "0x64006400"), f"mov.b32 f, {factor}; fma.rn.f16x2 t, t, f, $2; mul.rn.f16x2 $0, t, $3;")
        for shift, mask, factor in places
    )
    return Expansion(asm, "=r,r,r,r", (1024.0, 1024.0, 64.0, 64.0), (1.0,) * 4)


def _asm(first: str, then: str) -> str:
    return f"{{.reg .b32 t, f, a, b; {first} {then}}}"


def _masked(shift: int, mask: str, bits: str) -> str:
    """t = (($1 >> shift) & mask) | bits."""
    return f"shr.b32 t, $1, {shift}; lop3.b32 t, t, {mask}, {bits}, 0xEA;"


def _halves(slice_index: int) -> str:
    """t: the float16 numbers 1024 + the byte of each half of the register."""
    return f"prmt.b32 t, $1, 0x64646464, 0x4{slice_index + 2}4{slice_index};"


def _wide(slice_index: int) -> str:
    """a and b: the float32 numbers of a byte in each half of the register, plus the operands."""
    bytes_of = (f"prmt.b32 {name}, $1, 0x4B000000, 0x754{slice_index + half};" for name, half in (("a", 0), ("b", 2)))
    return f"{' '.join(bytes_of)} add.f32 a, a, $2; add.f32 b, b, $3;"


def _narrow(dtype: torch.dtype) -> str:
    return f"cvt.rn.{'bf16x2' if dtype == torch.bfloat16 else 'f16x2'}.f32 $0, b, a;"


@triton.jit
def expand_codes(words, x, slice_index: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr) -> tl.tensor:
    """The 4-bit codes of one slice as `expand_raw` says, in x's type."""
    if ASM is None:
        return codes_of_slice(words, slice_index, 4).to(x.dtype)
    else:
        return tl.inline_asm_elementwise(ASM[slice_index], CONSTRAINTS, [words], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def expand_differences(words, addend, x, slice_index: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr) -> tl.tensor:
    """The 8-bit codes of one slice plus `addend`, float32 [rows of words, 1], as `expand_less_zero` says, in x's type."""
    if ASM is None:
        return (codes_of_slice(words, slice_index, 8).to(tl.float32) + addend).to(x.dtype)
    else:
        addend = addend.to(tl.float16) if x.dtype == tl.float16 else addend
        operands = [words, tl.broadcast_to(addend, words.shape)]
        return tl.inline_asm_elementwise(ASM[slice_index], CONSTRAINTS, operands, dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def expand_weights(
    words,
    scale,
    x,
    slice_index: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
) -> tl.tensor:
    """The weights of one slice as `expand_scaled` says, in x's type; `scale` is float32 [rows of words, 1] as `split_scale` reads it."""
    wide_shape: tl.constexpr = words.shape
    if ASM is None:
        scale, zero = split_scale(scale, ZERO)
        return ((codes_of_slice(words, slice_index, BITS).to(tl.float32) - zero) * scale).to(x.dtype)
    elif BITS == 8 and x.dtype == tl.float16:
        addend = _less_zero(scale, x, OFFSETS[slice_index], ZERO) * (1.0 / _SCALE_UNIT)
        scale = (scale * _SCALE_UNIT).to(x.dtype)
        operands = [words, tl.broadcast_to(addend.to(x.dtype), wide_shape), tl.broadcast_to(scale, wide_shape)]
        return tl.inline_asm_elementwise(ASM[slice_index], CONSTRAINTS, operands, dtype=x.dtype, is_pure=True, pack=2)
    elif BITS == 8:
        scale, zero = split_scale(scale, ZERO)
        addend = tl.broadcast_to(0.0 - (zero + OFFSETS[slice_index]), wide_shape)
        operands = [words, addend, tl.broadcast_to(scale, wide_shape)]
        return tl.inline_asm_elementwise(ASM[slice_index], CONSTRAINTS, operands, dtype=x.dtype, is_pure=True, pack=2)
    else:
        addend = tl.broadcast_to(_less_zero(scale, x, OFFSETS[slice_index], ZERO), wide_shape)
        if x.dtype == tl.bfloat16:
            scale, _ = split_scale(scale, ZERO)
            near = scale.to(x.dtype)
            rest = (scale - near.to(tl.float32)).to(x.dtype)
            operands = [words, addend, tl.broadcast_to(near, wide_shape), tl.broadcast_to(rest, wide_shape)]
        else:
            # A zero point in the lowest 8 of the scale's 24 bits is rounded away: float16 keeps the highest 11.
            operands = [words, addend, tl.broadcast_to(scale.to(x.dtype), wide_shape)]
        return tl.inline_asm_elementwise(ASM[slice_index], CONSTRAINTS, operands, dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def _less_zero(scale, x, OFFSET: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    """-(OFFSET + zero point) in x's type, exactly: above -1024 and -128 the lowest bits of the number are the zero point.

    In bfloat16 of 4-bit codes alone: a zero point of 8 bits has no place there.
    """
    if ZERO >= 0:
        return tl.full(scale.shape, 0.0 - (OFFSET + ZERO), x.dtype)
    else:
        NEGATIVE: tl.constexpr = 0xC300 if x.dtype == tl.bfloat16 else 0xE400
        LARGEST: tl.constexpr = 128.0 if x.dtype == tl.bfloat16 else 1024.0
        bits = scale.to(tl.int32, bitcast=True) & 255 | NEGATIVE
        return bits.to(tl.int16).to(x.dtype, bitcast=True) + (LARGEST - OFFSET)
