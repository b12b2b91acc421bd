"""The MX cast of BF16 tiles with two elements in a register, for NVIDIA's chips from sm_90 on.

    h      = magnitude bits of a block's largest BF16 value: as 16-bit integers they are ordered as the values
    byte   = max(((h + up) >> 7) − emax, 0), 255 for NaN and Inf       up: as in `tiles.scale_byte`, 16 bits
    code   = round-to-nearest-even(x · 2^(127 − byte)), saturated      mul.rn.bf16x2, cvt.rn.satfinite
    value  = code · 2^(byte − 127), without the code                   `tiles.rounded` in 16 bits, BF16

The results have the same bits as in `tiles`. BF16 has FP32's exponents, so h gives the same bytes as FP32's
bits, and a product with a power of two is exact or below 2^−126, where both round to the zero of FP8 with its
sign. The bytes of two blocks lie in the halves of an int32; no sum or difference carries between halves.
Additions in BF16 can round values, because BF16 has 8 significant bits, and an element, as a multiple of its
step, has at most 4.

The constants below are PTX of instructions that Triton does not emit by itself.
``tests/triton_interpreter/exact_interpreter.py`` computes them as the PTX ISA 9.1 defines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile import formats
from mxcompile.lowering.kernels.tiles import BLOCK

LARGER = tl.constexpr("max.u16x2 $0, $1, $2;")
"""The larger of each half, as unsigned integers."""

SPECIAL = tl.constexpr("""{
    .reg .b32 t;
    add.u32 t, $1, 0x00800080;
    prmt.b32 $0, t, 0, 0xBB99;
}""")
"""0xFFFF for each half whose magnitude bits are 0x7F80 or more (Inf and NaN), else 0.

The sum sets the top bit of such a half. `prmt` with B or 9 repeats the sign of byte 3 or 1 in a whole byte.
"""

ROUND = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
"""BF16 of two FP32 values."""

_ENCODE = """{{
    .reg .b32 low, high;
    .reg .b16 first, second;
    mul.rn.bf16x2 low, $1, $3;
    mul.rn.bf16x2 high, $2, $4;
    cvt.rn.satfinite.{elem}x2.bf16x2 first, low;
    cvt.rn.satfinite.{elem}x2.bf16x2 second, high;
    mov.b32 $0, {{first, second}};
}}"""
ENCODE = {name: _ENCODE.format(elem=name) for name in formats.ELEM_TYPES}
"""FP8 codes of four BF16 values times four BF16 factors, by element type."""

_ENCODE_WIDE = """{{
    .reg .b32 low, high;
    .reg .b32 even, odd;
    .reg .b16 first, second;
    mul.rn.bf16x2 low, $1, $3;
    mul.rn.bf16x2 high, $2, $4;
    shl.b32 even, low, 16;
    and.b32 odd, low, 0xFFFF0000;
    cvt.rn.satfinite.{elem}x2.f32 first, odd, even;
    shl.b32 even, high, 16;
    and.b32 odd, high, 0xFFFF0000;
    cvt.rn.satfinite.{elem}x2.f32 second, odd, even;
    mov.b32 $0, {{first, second}};
}}"""
ENCODE_WIDE = {name: _ENCODE_WIDE.format(elem=name) for name in formats.ELEM_TYPES}
"""`ENCODE` for chips whose conversion to FP8 reads FP32."""

_VALUE = """{{
    .reg .b32 y, magic, least, value;
    mul.rn.bf16x2 y, $1, $2;{saturate}
    mov.b32 least, {least};
    and.b32 magic, y, 0x7F807F80;
    max.u16x2 magic, magic, least;
    add.u32 magic, magic, {up};
    add.rn.bf16x2 value, y, magic;
    sub.rn.bf16x2 value, value, magic;
    and.b32 y, y, 0x80008000;
    or.b32 value, value, y;
    mul.rn.bf16x2 $0, value, $3;
}}"""
_SATURATE = """
    mov.b32 least, {most};
    min.NaN.bf16x2 y, y, least;
    xor.b32 least, least, 0x80008000;
    max.NaN.bf16x2 y, y, least;"""


def _value_asm_of(elem: formats.ElemType, saturates: bool) -> str:
    """Returns PTX of the quantized values of two BF16 elements, from factors and scales."""
    most = (elem.emax + 127 << 7) + 0x60  # 1.75 · 2^emax
    up = (7 - elem.mantissa_bits << 7) + 0x40
    words = (f"0x{bits * 0x10001:08X}" for bits in (elem.min_exponent + 127 << 7, up, most))
    least, up_word, most_word = words
    saturate = _SATURATE.format(most=most_word) if saturates else ""
    return _VALUE.format(least=least, up=up_word, saturate=saturate)


VALUE = {
    (name, saturates): _value_asm_of(elem, saturates)
    for name, elem in formats.ELEM_TYPES.items()
    for saturates in (False, True)
}
"""PTX of two quantized values, by element type and whether elements may exceed its largest value."""

SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.rn.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.rn.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")
"""1 / (1 + 2^(−x · log2 e)), FP32; see `sigmoid`."""


@triton.constexpr_function
def _encode_asm(elem, narrow):
    return (ENCODE if narrow else ENCODE_WIDE)[elem]


@triton.constexpr_function
def _value_asm(elem, rounding):
    return VALUE[elem, rounding in ("floor", "even")]


@triton.constexpr_function
def _twice(bits):
    """Returns an int32 with the 16 `bits` in both halves."""
    both = bits * 0x10001
    return both - (1 << 32) if both >> 31 else both


@triton.constexpr_function
def _emax(elem):
    return formats.ELEM_TYPES[elem].emax << 7


@triton.constexpr_function
def _up(elem, rounding):
    """Returns the constant that `rounding` adds to the bits of a block's amax before reading its exponent."""
    even = 1 << (6 - formats.ELEM_TYPES[elem].mantissa_bits)
    return {"floor": 0, "rceil": 0x1F, "ceil": 0x7F, "even": even}[rounding]


@triton.jit
def larger(a, b):
    """Returns the larger of each half of two int32, as unsigned 16-bit integers."""
    return tl.inline_asm_elementwise(LARGER, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def magnitudes(x):
    """Returns the magnitudes of `x`, BF16 [R, C], with two neighbours in an int32: [R, C / 2]."""
    low, high = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), (x.shape[0], x.shape[1] // 2, 2)))
    return ((high.to(tl.int32) << 16) | low.to(tl.int32)) & 0x7FFF7FFF


@triton.jit
def scale_pairs(largest, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """Returns scale bytes and BF16 bits of 2^(127 − byte). An int32 holds two blocks; largest: two amaxes."""
    EMAX: tl.constexpr = _twice(_emax(ELEM))
    MOST: tl.constexpr = _twice((254 << 7) + _emax(ELEM))
    UP: tl.constexpr = _twice(_up(ELEM, ROUNDING))
    EXPONENT: tl.constexpr = _twice(0xFF80)
    special = tl.inline_asm_elementwise(SPECIAL, "=r,r", [largest], dtype=tl.int32, is_pure=True, pack=1)
    exponent = larger((largest + UP) & EXPONENT, tl.full(largest.shape, EMAX, tl.int32))
    inverse = (MOST - exponent) | special
    return (((exponent - EMAX) >> 7) | special) & 0x00FF00FF, inverse  # BF16's exponent fields as bytes


@triton.jit
def _low(pair):
    return (pair & 0xFFFF).to(tl.uint16)


@triton.jit
def _halves(pairs):
    return tl.reshape(tl.join(_low(pairs), _low(pairs >> 16)), (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def scale_value_pairs(byte):
    """Returns BF16 bits of 2^(byte − 127) of two scale bytes each, from `scale_pairs`; undefined for 255."""
    return larger(byte << 7, tl.full(byte.shape, 0x00400040, tl.int32))  # 2^−127 is subnormal


@triton.jit
def _encode(x, inverse, ELEM: tl.constexpr, NARROW: tl.constexpr):
    ASM: tl.constexpr = _encode_asm(ELEM, NARROW)
    inverse = inverse.to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [x, inverse], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _value(x, inverse, scale, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    ASM: tl.constexpr = _value_asm(ELEM, ROUNDING)
    inverse, scale = inverse.to(tl.bfloat16, bitcast=True), scale.to(tl.bfloat16, bitcast=True)
    arguments = [x, inverse, scale]
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", arguments, dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _rowwise_scales(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    words = tl.reshape(magnitudes(x), (x.shape[0], x.shape[1] // BLOCK, BLOCK // 2))
    pairs = tl.reduce(words, 2, larger)
    return scale_pairs(larger(pairs, pairs >> 16) & 0xFFFF, ELEM, ROUNDING)


@triton.jit
def _along_rows(bits):
    """Returns [R, C]: for each element, the low half of its block's int32 in `bits` [R, C / 32]."""
    R: tl.constexpr = bits.shape[0]
    B: tl.constexpr = bits.shape[1]
    return tl.reshape(tl.broadcast_to(_low(bits)[:, :, None], (R, B, BLOCK)), (R, B * BLOCK))


@triton.jit
def _columnwise_scales(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    words = tl.reshape(magnitudes(x), (x.shape[0] // BLOCK, BLOCK, x.shape[1] // 2))
    return scale_pairs(tl.reduce(words, 1, larger), ELEM, ROUNDING)


@triton.jit
def _along_columns(bits):
    """Returns [R, C]: for each element, its block's half of an int32 in `bits` [R / 32, C / 2]."""
    B: tl.constexpr = bits.shape[0]
    C: tl.constexpr = 2 * bits.shape[1]
    return tl.reshape(tl.broadcast_to(_halves(bits)[:, None, :], (B, BLOCK, C)), (B * BLOCK, C))


@triton.jit
def quantize_rowwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr, NARROW: tl.constexpr = True):
    """`tiles.quantize_rowwise` of BF16 [R, C]: codes uint8 [R, C], scale bytes uint8 [R, C / 32].

    NARROW: whether the chip's conversion reads BF16 (`choices.packing.converts`).
    """
    byte, inverse = _rowwise_scales(x, ELEM, ROUNDING)
    return _encode(x, _along_rows(inverse), ELEM, NARROW), byte.to(tl.uint8)


@triton.jit
def quantize_columnwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr, NARROW: tl.constexpr = True):
    """`tiles.quantize_columnwise` of BF16 [R, C]: codes uint8 [R, C], scale bytes uint8 [R / 32, C]."""
    byte, inverse = _columnwise_scales(x, ELEM, ROUNDING)
    codes = _encode(x, _along_columns(inverse), ELEM, NARROW)
    return codes, _halves(byte).to(tl.uint8)


@triton.jit
def round_rowwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """`tiles.round_rowwise` of BF16 [R, C], rounded to BF16."""
    byte, inverse = _rowwise_scales(x, ELEM, ROUNDING)
    scale = _along_rows(scale_value_pairs(byte))
    return _value(x, _along_rows(inverse), scale, ELEM, ROUNDING)


@triton.jit
def round_columnwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """`tiles.round_columnwise` of BF16 [R, C], rounded to BF16."""
    byte, inverse = _columnwise_scales(x, ELEM, ROUNDING)
    scale = _along_columns(scale_value_pairs(byte))
    return _value(x, _along_columns(inverse), scale, ELEM, ROUNDING)


@triton.jit
def rounded(x):
    """Returns `x`, FP32, as BF16, two values at a time."""
    if x.dtype == tl.float32:
        x = tl.inline_asm_elementwise(ROUND, "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    return x.to(tl.bfloat16)


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(−x)) in FP32, by the chip's approximations of 2^x and 1 / x.

    The relative error is at most 2^−17 for results from 2^−126 on; smaller results are 0. Rounded to BF16,
    whose last place is 2^−8, a result is off by at most one unit in that place.
    """
    wide = x.to(tl.float32)
    return tl.inline_asm_elementwise(SIGMOID, "=f,f", [wide], dtype=tl.float32, is_pure=True, pack=1)
