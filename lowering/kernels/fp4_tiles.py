"""E2M1 on register tiles: Triton device functions for the template of FP4 casts, and back for stored weights.

    mxfp4   byte   = exponent of the scale, from the FP32 bits of the block's amax (`tiles.scale_byte`)
            y      = x · 2^(127 − byte)
    nvfp4   G      = 448 · 6 / amax of the tensor, 1 where that is 0, NaN where it is not finite
            byte   = E4M3 bits of the amax of the block or tile · (G · 1/6), saturated
            y      = x · min(1 / (E4M3 value · (1 / G)), largest FP32)
    code    sign, 2 bits of exponent, 1 of mantissa of round-to-nearest-even(y), saturated to ±6; or rounded
            at random by the word of the element (`formats.stochastic`)

    value  2^-14 of it is an FP16 number, whose exponent and mantissa the code has at the same place

Bit-exact with ``formats.encoding``, but for the codes of blocks under a NaN scale, whose values are NaN
whatever they are. A byte holds two codes, the first in its low half. Blocks lie along the last dimension of
a tile, which is the contraction; casts along columns transpose their tile first. Not here: memory, masks.

Compile-time arguments as in `tiles`, and

    BLOCK       elements along a scale: 32 of mxfp4, 16 of nvfp4
    ACROSS      rows that share a scale
    TWO_LEVEL   whether it is nvfp4
    NATIVE      whether the chip converts pairs of FP32 to E2M1, else integers give the same codes
    PTX         whether it is NVIDIA's, so that four codes are decoded at a time
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.formats import E4M3
from mxcompile.formats.encoding import FP32_MAX
from mxcompile.formats.stochastic import MULTIPLIER, ROUNDS, WEYL
from mxcompile.formats.types import E2M1
from mxcompile.lowering.kernels import tiles

_ELEM = tl.constexpr(E2M1.name)
_LARGEST = tl.constexpr(E2M1.max)
_LARGEST_SCALE = tl.constexpr(E4M3.max)
_LARGEST_VALUE = tl.constexpr(E2M1.max * E4M3.max)
_FP32_MAX = tl.constexpr(FP32_MAX)
_EMAX = tl.constexpr(E2M1.emax)
_INF_BITS = tl.constexpr(0x7F800000)
_ROUNDS, _WEYL, _MULTIPLIER = tl.constexpr(ROUNDS), tl.constexpr(WEYL), tl.constexpr(MULTIPLIER)

PAIRS = tl.constexpr("""{
    .reg .b8 first, second, third, fourth;
    cvt.rn.satfinite.e2m1x2.f32 first, $5, $1;
    cvt.rn.satfinite.e2m1x2.f32 second, $6, $2;
    cvt.rn.satfinite.e2m1x2.f32 third, $7, $3;
    cvt.rn.satfinite.e2m1x2.f32 fourth, $8, $4;
    mov.b32 $0, {first, second, third, fourth};
}""")
"""Four bytes of two E2M1 codes each: of FP32 $1 to $4 in the low halves, of $5 to $8 in the high ones."""


_PAIR = """
    prmt.b32 pair, word, 0, {bytes};
    shr.b32 size, pair, {shift};
    and.b32 size, size, {mask};
    lop3.b32 {result}, pair, 0x80008000, size, 0xEA;"""
"""The codes of the high halves of two bytes, moved to where numbers of 16 bits have sign and exponent."""


def _fp16_asm(place: int) -> str:
    """PTX of 2^-14 of four values in FP16, of the codes in the halves `place` of four bytes."""
    pairs = (
        _PAIR.format(bytes=each, shift=3, mask="0x0E000E00", result=result)
        for each, result in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    return f"{{\n    .reg .b32 word, pair, size;\n    shl.b32 word, $2, {4 - 4 * place};{''.join(pairs)}\n}}"


def _bf16_asm(place: int) -> str:
    """PTX of four values times as many numbers of BF16, in BF16: first as 2^-126 of the values."""
    product = """
    fma.rn.bf16x2 pair, pair, up, none;
    fma.rn.bf16x2 {result}, pair, {factor}, none;"""
    pairs = (
        _PAIR.format(bytes=each, shift=6, mask="0x01C001C0", result="pair")
        + product.format(result=result, factor=factor)
        for each, result, factor in (("0x1404", "$0", "$3"), ("0x3424", "$1", "$4"))
    )
    constants = "    mov.b32 up, 0x7E807E80;\n    mov.b32 none, 0x80008000;"  # 2^126; −0, to add nothing
    head = f"    .reg .b32 word, pair, size, up, none;\n{constants}"
    return f"{{\n{head}\n    shl.b32 word, $2, {4 - 4 * place};{''.join(pairs)}\n}}"


DECODED, SCALED = (tuple(map(asm, (0, 1))) for asm in (_fp16_asm, _bf16_asm))
"""By place: see `decoded` and `times`."""


@triton.constexpr_function
def _decoded_asm(place):
    return DECODED[place]


@triton.constexpr_function
def _scaled_asm(place):
    return SCALED[place]


@triton.jit
def gain(amax):
    """G of the amax of a tensor, FP32."""
    value = tl.minimum(tl.div_rn(tl.full(amax.shape, _LARGEST_VALUE, tl.float32), amax), _FP32_MAX)
    value = tl.where(amax == 0.0, 1.0, value)
    return tl.where(tiles.magnitude_bits(amax) < _INF_BITS, value, float("nan"))


@triton.jit
def _two_level(block_amax, tensor_gain):
    """E4M3 bytes of blocks, uint8, and the factors of their elements, FP32."""
    over = block_amax * (tensor_gain * (1 / _LARGEST))
    over = tl.minimum(over, _LARGEST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    byte = tiles.encode(over, "e4m3", "rceil", True)
    one = tl.full(over.shape, 1.0, tl.float32)
    back = tl.div_rn(tl.full(tensor_gain.shape, 1.0, tl.float32), tensor_gain)
    factor = tl.div_rn(one, tiles.decode(byte, "e4m3", True) * back)
    return byte, tl.minimum(factor, _FP32_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _block_amax(low, high, BLOCK: tl.constexpr, ACROSS: tl.constexpr):
    """FP32 bits of the largest magnitude of every block of rows, those of a tile the same."""
    R: tl.constexpr = low.shape[0]
    C: tl.constexpr = 2 * low.shape[1]
    larger = tl.maximum(tiles.magnitude_bits(low), tiles.magnitude_bits(high))
    amax = tl.max(tl.reshape(larger, (R, C // BLOCK, BLOCK // 2)), 2)
    if ACROSS > 1:
        amax = tl.max(tl.reshape(amax, (R // ACROSS, ACROSS, C // BLOCK)), 1)
        amax = tl.broadcast_to(amax[:, None, :], (R // ACROSS, ACROSS, C // BLOCK))
        amax = tl.reshape(amax, (R, C // BLOCK))
    return amax


@triton.jit
def scaled(
    low,
    high,
    tensor_gain,
    BLOCK: tl.constexpr,
    ACROSS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Elements of a tile, to be rounded, |y| ≤ 6 or NaN, FP32, and scale bytes uint8 [R, C / BLOCK].

    low, high: its elements in even places and in odd ones, FP32 [R, C / 2], as are those returned.
    tensor_gain: `gain` of the tensor, [1, 1], of nvfp4.
    """
    amax = _block_amax(low, high, BLOCK, ACROSS)
    if TWO_LEVEL:
        byte, factor = _two_level(amax.to(tl.float32, bitcast=True), tensor_gain)
    else:
        exponent = tiles.scale_byte(amax, _ELEM, ROUNDING)
        byte, factor = exponent.to(tl.uint8), tiles.inverse_scale(exponent)
    return _times(low, factor), _times(high, factor), byte


@triton.jit
def _times(x, factor):
    """X [R, C / 2] by the factors of its blocks, with ±6 for what is beyond."""
    blocks: tl.constexpr = (x.shape[0], factor.shape[1], x.shape[1] // factor.shape[1])
    y = tl.reshape(tl.reshape(x, blocks) * factor[:, :, None], x.shape)
    return tl.clamp(y, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _code(value):
    """Codes of E2M1 values, FP32 or NaN: int32."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = tl.where(magnitude == 0, 0, 1)  # 0.5 is the only value below 1
    code = tl.where(magnitude < 0x3F800000, small, (magnitude >> 22) - 252)
    return tl.where(magnitude > _INF_BITS, 0, code | ((bits >> 28) & 8))


@triton.jit
def packed(low, high, NATIVE: tl.constexpr):
    """Bytes of the codes nearest to `low` and `high`, FP32, |y| ≤ 6 or NaN; even on ties."""
    if NATIVE:
        args = [low, high]
        return tl.inline_asm_elementwise(
            PAIRS, "=r,f,f,f,f,f,f,f,f", args, dtype=tl.uint8, is_pure=True, pack=4
        )
    return _joined(tiles.rounded(low, _ELEM), tiles.rounded(high, _ELEM))


@triton.jit
def _joined(low, high):
    return (_code(low) | (_code(high) << 4)).to(tl.uint8)


@triton.jit
def decoded(codes, PLACE: tl.constexpr, PTX: tl.constexpr):
    """2^-14 of the values of the codes in bytes, FP16, exact. PLACE: 0 for those in the low halves, or 1."""
    if PTX:
        return tl.inline_asm_elementwise(
            _decoded_asm(PLACE), "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    code = codes.to(tl.int16) >> (4 * PLACE)
    return (((code & 0x8) << 12) | ((code & 0x7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def times(codes, factors, PLACE: tl.constexpr, PTX: tl.constexpr):
    """The values of the codes in bytes times `factors`, BF16, rounded once. PLACE: as in `decoded`."""
    if PTX:
        args = [codes, factors]
        return tl.inline_asm_elementwise(
            _scaled_asm(PLACE), "=r,=r,r,r,r", args, dtype=tl.bfloat16, is_pure=True, pack=4
        )
    values = decoded(codes, PLACE, False).to(tl.float32) * 16384.0
    return (values * factors.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def word(index, stream, seed):
    """The random word of an element, uint32: `formats.stochastic.philox`. index: its place, modulo 2^32."""
    left = index.to(tl.uint32)
    right = tl.full(index.shape, 0, tl.uint32) + stream.to(tl.uint32)
    key = tl.full(index.shape, 0, tl.uint32) + seed.to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        factor = tl.full(index.shape, _MULTIPLIER, tl.uint32)
        high = tl.umulhi(left, factor)
        low = left * factor
        left = high ^ key ^ right
        right = low
        key = key + tl.full(index.shape, _WEYL, tl.uint32)
    return left


@triton.jit
def rounded_by(y, random):
    """`y`, FP32, |y| ≤ 6 or NaN, as the value of E2M1 that `random`, a `word`, rounds it to; FP32."""
    magnitude = tl.abs(y)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, 0), _EMAX)
    steps = magnitude * ((128 - exponent) << 23).to(tl.float32, bitcast=True)
    whole = tl.floor(steps)
    up = (random >> 8).to(tl.float32) * (2.0**-24) < steps - whole
    value = (whole + tl.where(up, 1.0, 0.0)) * ((126 + exponent) << 23).to(tl.float32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Elements of a tile [R, C] in even places along its rows, and those in odd ones: [R, C / 2], FP32.

    Done before all else, this leaves each thread whole blocks: what a scale needs, one thread computes.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.reshape(x, (R, C // 2, 2)))
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _stage(x, APART: tl.constexpr):
    """Sums and differences of elements of x [R, C] that lie `APART` places apart, in their places."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (R, C // (2 * APART), 2, APART)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    pairs = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (R, C))


@triton.jit
def _signed(x, SIGNS: tl.constexpr, ODD: tl.constexpr):
    """X [R, C / 2], elements in even places or odd ones, with the signs of their places."""
    blocks: tl.constexpr = (x.shape[0], x.shape[1] // 8, 8)
    minus = (SIGNS >> (2 * tl.arange(0, 8) + ODD)) & 1
    sign = tl.where(minus == 1, -1.0, 1.0)
    return tl.reshape(tl.reshape(x, blocks) * sign[None, None, :], x.shape)


@triton.jit
def transformed(low, high, SIGNS: tl.constexpr, DTYPE: tl.constexpr):
    """The random Hadamard transform of a tile along its rows, as `formats.hadamard` has it, in its dtype.

    low, high: elements in even places and in odd ones, FP32 [R, C / 2], as are those returned.
    """
    low, high = _signed(low, SIGNS, 0), _signed(high, SIGNS, 1)
    low, high = low + high, low - high
    for bit in tl.static_range(3):
        low, high = _stage(low, 1 << bit), _stage(high, 1 << bit)
    return (low * 0.25).to(DTYPE).to(tl.float32), (high * 0.25).to(DTYPE).to(tl.float32)


@triton.jit
def largest(low, high):
    """The largest magnitude of a tile, FP32 [1]; NaN if one is NaN."""
    bits = tl.maximum(tiles.magnitude_bits(low), tiles.magnitude_bits(high))
    return tl.max(tl.max(bits, 1), 0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def store_scale(ptr, byte, rows, blocks, R, BLOCKS):
    """Store bytes [rows, blocks] in tiles, of an operand of `R` rows and `BLOCKS` blocks; padding is 0."""
    row, block = rows[:, None], blocks[None, :]
    inside = (row < (R + 127) // 128 * 128) & (block < (BLOCKS + 3) // 4 * 4)
    byte = tl.where((row < R) & (block < BLOCKS), byte, 0)
    tl.store(ptr + tiles.swizzled_offset(row, block, BLOCKS), byte, mask=inside)
