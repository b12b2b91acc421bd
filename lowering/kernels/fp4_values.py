"""Decoding of E2M1 on register tiles: Triton device functions for products with stored FP4 weights.

    2^-14 · value   the FP16 number with the code's sign, exponent and mantissa bits: FP16's exponent bias is
                    15, E2M1's is 1; subnormals stay subnormals
    2^-126 · value  the BF16 number with the same bits; BF16's exponent bias is 127

A byte holds two codes, the first in its low half. `decoded` is exact, `times` rounds once. On NVIDIA's chips
from sm_80 on, PTX decodes four bytes at a time. Not here: scales, memory; the cast to E2M1 (``fp4_tiles``).
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAIR = """
    prmt.b32 pair, word, 0, {bytes};
    shr.b32 size, pair, {shift};
    and.b32 size, size, {mask};
    lop3.b32 {result}, pair, 0x80008000, size, 0xEA;"""
"""Moves the codes in the high halves of two bytes to sign, exponent and mantissa of two 16-bit numbers."""

_BYTES = ("0x1404", "0x3424")


def _fp16_asm(half: int) -> str:
    """Returns PTX of 2^-14 · value in FP16 of four codes. half: 0 for low halves of bytes, 1 for high."""
    pairs = (
        _PAIR.format(bytes=selector, shift=3, mask="0x0E000E00", result=result)
        for selector, result in zip(_BYTES, ("$0", "$1"), strict=True)
    )
    return f"{{\n    .reg .b32 word, pair, size;\n    shl.b32 word, $2, {4 - 4 * half};{''.join(pairs)}\n}}"


def _bf16_asm(half: int) -> str:
    """Returns PTX of four values times four BF16 factors, in BF16, from 2^-126 · value."""
    product = """
    fma.rn.bf16x2 pair, pair, up, none;
    fma.rn.bf16x2 {result}, pair, {factor}, none;"""
    pairs = (
        _PAIR.format(bytes=selector, shift=6, mask="0x01C001C0", result="pair")
        + product.format(result=result, factor=factor)
        for selector, result, factor in zip(_BYTES, ("$0", "$1"), ("$3", "$4"), strict=True)
    )
    constants = "    mov.b32 up, 0x7E807E80;\n    mov.b32 none, 0x80008000;"  # 2^126; −0, to add nothing
    head = f"    .reg .b32 word, pair, size, up, none;\n{constants}"
    return f"{{\n{head}\n    shl.b32 word, $2, {4 - 4 * half};{''.join(pairs)}\n}}"


DECODED, SCALED = (tuple(map(asm, (0, 1))) for asm in (_fp16_asm, _bf16_asm))
"""PTX of `decoded` and of `times`, by half of the byte."""


@triton.constexpr_function
def _asm(scaled, half):
    return (SCALED if scaled else DECODED)[half]


@triton.jit
def decoded(codes, PLACE: tl.constexpr, PTX: tl.constexpr):
    """Returns 2^-14 · value of codes, FP16, exact. PLACE: 0 for low halves of bytes, 1 for high halves."""
    if PTX:
        return tl.inline_asm_elementwise(
            _asm(False, PLACE), "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    code = codes.to(tl.int16) >> (4 * PLACE)
    return (((code & 0x8) << 12) | ((code & 0x7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def times(codes, factors, PLACE: tl.constexpr, PTX: tl.constexpr):
    """Returns decoded `codes` times `factors` in BF16, rounded once. PLACE: as in `decoded`."""
    if PTX:
        args = [codes, factors]
        return tl.inline_asm_elementwise(
            _asm(True, PLACE), "=r,=r,r,r,r", args, dtype=tl.bfloat16, is_pure=True, pack=4
        )
    values = decoded(codes, PLACE, False).to(tl.float32) * 16384.0
    return (values * factors.to(tl.float32)).to(tl.bfloat16)
