"""The cast to E2M1 on register tiles: Triton device functions that the template of FP4 casts calls.

    mxfp4   byte   = exponent of the scale, from the FP32 bits of the block's amax (`tiles.scale_byte`)
            y      = x · 2^(127 − byte)
    nvfp4   G      = 448 · 6 / amax of the tensor, 1 where that is 0, NaN where it is not finite
            byte   = E4M3 bits of the amax of the block or tile · (G · 1/6), saturated
            y      = x · min(1 / (E4M3 value · (1 / G)), largest FP32)
    code    sign, 2 bits of exponent, 1 of mantissa of round-to-nearest-even(y), saturated to ±6; or rounded
            at random by the word of the element (`formats.stochastic`)

Bit-exact with ``formats.encoding``, but for the codes of blocks under a NaN scale, whose values are NaN
whatever they are. A byte holds two codes, the first in its low half. Blocks lie along the last dimension of
a tile, which is the contraction; casts along columns transpose their tile first. Not here: memory, masks.

Compile-time arguments as in `tiles`, and

    BLOCK       elements along a scale: 32 of mxfp4, 16 of nvfp4
    ACROSS      rows that share a scale
    TWO_LEVEL   whether it is nvfp4
    NATIVE      whether the chip converts pairs of FP32 to E2M1, else integers give the same codes
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
def _block_amax(x, BLOCK: tl.constexpr, ACROSS: tl.constexpr):
    """FP32 bits of the largest magnitude of every block of rows, those of a tile the same. x: [R, C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    amax = tl.max(tl.reshape(tiles.magnitude_bits(x), (R, C // BLOCK, BLOCK)), 2)
    if ACROSS > 1:
        amax = tl.max(tl.reshape(amax, (R // ACROSS, ACROSS, C // BLOCK)), 1)
        amax = tl.broadcast_to(amax[:, None, :], (R // ACROSS, ACROSS, C // BLOCK))
        amax = tl.reshape(amax, (R, C // BLOCK))
    return amax


@triton.jit
def scaled(
    x,
    tensor_gain,
    BLOCK: tl.constexpr,
    ACROSS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """Elements of a tile [R, C], to be rounded, |y| ≤ 6 or NaN, FP32, and scale bytes uint8 [R, C / BLOCK].

    x: FP32. tensor_gain: `gain` of the tensor, [1, 1], of nvfp4.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    amax = _block_amax(x, BLOCK, ACROSS)
    if TWO_LEVEL:
        byte, factor = _two_level(amax.to(tl.float32, bitcast=True), tensor_gain)
    else:
        exponent = tiles.scale_byte(amax, _ELEM, ROUNDING)
        byte, factor = exponent.to(tl.uint8), tiles.inverse_scale(exponent)
    y = tl.reshape(x, (R, C // BLOCK, BLOCK)) * factor[:, :, None]
    y = tl.clamp(tl.reshape(y, (R, C)), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return y, byte


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
def word(index, stream, seed):
    """The random word of an element, uint32: `formats.stochastic.philox`. index: its place in the tensor."""
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
def halves(y):
    """Elements in even places along the last dimension, and those in odd ones. y: [R, C]."""
    R: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    return tl.split(tl.reshape(y, (R, C // 2, 2)))


@triton.jit
def store_scale(ptr, byte, rows, blocks, R, BLOCKS):
    """Store bytes [rows, blocks] in tiles, of an operand of `R` rows and `BLOCKS` blocks; padding is 0."""
    row, block = rows[:, None], blocks[None, :]
    inside = (row < (R + 127) // 128 * 128) & (block < (BLOCKS + 3) // 4 * 4)
    byte = tl.where((row < R) & (block < BLOCKS), byte, 0)
    tl.store(ptr + tiles.swizzled_offset(row, block, BLOCKS), byte, mask=inside)
