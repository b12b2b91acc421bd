"""The cast to E2M1 on register tiles: Triton device functions that the templates of FP4 casts call.

    mxfp4   byte   = exponent of the scale, from the FP32 bits of the block's amax (`tiles.scale_byte`)
            y      = x · 2^(127 − byte)
    nvfp4   G      = 448 · 6 / amax of the tensor, 1 where that is 0, NaN where it is not finite
            byte   = E4M3 bits of the amax of the block or tile · (G · 1/6), saturated
            y      = x · min(1 / (E4M3 value · (1 / G)), largest FP32)
    code    sign, 2 bits of exponent, 1 of mantissa of round-to-nearest-even(y), saturated to ±6; or rounded
            by the random bits of the element (`formats.stochastic`)

Bit-exact with ``formats.encoding``, except for the codes of blocks with a NaN scale, whose values are NaN
for any code. A byte holds two codes, the first in its low half.

A tile is [R, G, C]: row g · R + r of G · R, column c. R is the length of a block, so that each thread holds
whole blocks along columns, and computes their scales and transforms alone. These functions pass a tile as the
FP32 values of its even columns and of its odd columns, [R, G, C / 2] each, because two neighbours are often
the operands of one instruction. Not here: memory, masks.

Compile-time arguments as in `tiles`, and

    BLOCK       elements along a scale: 32 of mxfp4, 16 of nvfp4
    SQUARE      whether BLOCK rows share the scale too
    TWO_LEVEL   whether the format is nvfp4
    PTX         whether the chip is NVIDIA's, from sm_100 on; else Triton's operators give the same bits
    BF16        whether the values come from BF16: their amax is then computed two values at a time
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.formats import E4M3
from mxcompile.formats.elements import E2M1
from mxcompile.formats.stochastic import MULTIPLIER, ROUNDS, WEYL
from mxcompile.formats.two_level import FP32_MAX
from mxcompile.lowering.kernels import fp4_ptx, packed, tiles

_ELEM = tl.constexpr(E2M1.name)
_LARGEST = tl.constexpr(E2M1.max)
_LARGEST_VALUE = tl.constexpr(E2M1.max * E4M3.max)
_FP32_MAX = tl.constexpr(FP32_MAX)
_ROUNDS, _WEYL, _MULTIPLIER = tl.constexpr(ROUNDS), tl.constexpr(WEYL), tl.constexpr(MULTIPLIER)
_TINY, _HUGE = tl.constexpr(2.0**-100), tl.constexpr(2.0**64)


@triton.jit
def split(x, BF16: tl.constexpr, SIGNS: tl.constexpr = 0):
    """Returns even and odd columns of a tile [R, G, C] as FP32 [R, G, C / 2].

    SIGNS: row r is negated if bit r mod 16 is 1.
    """
    pairs: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 2, 2)
    minus = ((SIGNS >> (tl.arange(0, x.shape[0]) & 15)) & 1 == 1)[:, None, None]
    if BF16:
        even, odd = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), pairs))
        words = (odd.to(tl.int32) << 16) | even.to(tl.int32)
        return _floats(words ^ tl.where(minus, -0x7FFF8000, 0))
    even, odd = tl.split(tl.reshape(x, pairs))
    sign = tl.where(minus, -1.0, 1.0)  # Triton's -x is 0 - x, which is 0 for 0
    return even.to(tl.float32) * sign, odd.to(tl.float32) * sign


@triton.jit
def _floats(words):
    """Returns FP32 of the BF16 numbers in the low halves of int32, and in the high halves."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _words(even, odd):
    """Returns int32 with two BF16 numbers each: the inverse of `_floats`."""
    low = (even.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
    return low | (odd.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _two(ASM: tl.constexpr, a, b, c, d):
    args = [a, b, c, d]
    return tl.inline_asm_elementwise(
        ASM, "=f,=f,f,f,f,f", args, dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def _times(even, odd, factor, other, PTX: tl.constexpr):
    """Returns the products `even` · `factor` and `odd` · `other`, in FP32."""
    if PTX:
        return _two(fp4_ptx.MULTIPLY, even, odd, factor, other)
    return even * factor, odd * other


@triton.jit
def gain(amax):
    """Returns G, FP32, of a tensor with this `amax`."""
    value = tl.minimum(tl.div_rn(tl.full(amax.shape, _LARGEST_VALUE, tl.float32), amax), _FP32_MAX)
    value = tl.where(amax == 0.0, 1.0, value)
    return tl.where(tiles.magnitude_bits(amax) < tiles.INF_BITS, value, float("nan"))


@triton.jit
def _reciprocal(x, PTX: tl.constexpr, small):
    """Returns 1 / x in FP32, x ≥ 0; Inf or NaN for 0. small: whether x may be less than 2^−91."""
    if PTX:
        up = tl.where(small, _HUGE, 1.0)
        inverse = tl.inline_asm_elementwise(
            fp4_ptx.RECIPROCAL, "=f,f", [x * up], dtype=tl.float32, is_pure=True, pack=1
        )
        return inverse * up
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _scale(amax_bits, tensor_gain, TWO_LEVEL: tl.constexpr, ROUNDING: tl.constexpr, PTX: tl.constexpr):
    """Returns uint8 scales of blocks, and FP32 factors of their elements. amax_bits: FP32 bits of maxima."""
    if TWO_LEVEL:
        over = amax_bits.to(tl.float32, bitcast=True) * (tensor_gain * (1 / _LARGEST))
        byte = tiles.encode(over, "e4m3", "floor", True, SATURATES=True)  # chips with E4M3 scales do
        back = tl.div_rn(tl.full(tensor_gain.shape, 1.0, tl.float32), tensor_gain)
        factor = _reciprocal(tiles.decode(byte, "e4m3", True) * back, PTX, back < _TINY)
        factor = tl.minimum(factor, _FP32_MAX)  # NaN too: the scale is 0, or NaN itself
    else:
        exponent = tiles.scale_byte(amax_bits, _ELEM, ROUNDING)
        byte, factor = exponent.to(tl.uint8), tiles.inverse_scale(exponent)
    return byte, factor


@triton.jit
def _magnitudes(even, odd, BF16: tl.constexpr):
    """Returns int32: pairs of BF16 magnitudes, or FP32 bits of the larger magnitude of both."""
    if BF16:
        return _words(even, odd) & 0x7FFF7FFF
    return tl.maximum(tiles.magnitude_bits(even), tiles.magnitude_bits(odd))


@triton.jit
def _largest_of(pairs, AXIS: tl.constexpr, BF16: tl.constexpr):
    """Returns the largest of `_magnitudes` along an axis; if BF16, of each half separately."""
    if BF16:
        return tl.reduce(pairs, AXIS, packed.larger)
    return tl.max(pairs, AXIS)


@triton.jit
def _of_halves(pairs, BF16: tl.constexpr):
    """Returns the FP32 bits of the larger half."""
    if BF16:
        return packed.larger(pairs, pairs >> 16) << 16
    return pairs


@triton.jit
def _columns_largest(even, odd, BF16: tl.constexpr):
    """Returns FP32 bits of the amax of blocks along even columns and along odd columns, [G, C / 2] each."""
    if BF16:
        pairs = tl.reduce(_magnitudes(even, odd, BF16), 0, packed.larger)
        return pairs << 16, pairs & -65536
    return tl.max(tiles.magnitude_bits(even), 0), tl.max(tiles.magnitude_bits(odd), 0)


@triton.jit
def _blocks_largest(even, odd, BLOCK: tl.constexpr, SQUARE: tl.constexpr, BF16: tl.constexpr):
    """Returns FP32 bits of the amax of blocks of rows, [R, G, C / BLOCK], or squares, [1, G, C / BLOCK]."""
    R: tl.constexpr = even.shape[0]
    G: tl.constexpr = even.shape[1]
    blocks: tl.constexpr = 2 * even.shape[2] // BLOCK
    pairs = tl.reshape(_magnitudes(even, odd, BF16), (R, G, blocks, BLOCK // 2))
    if SQUARE:
        pairs = _largest_of(pairs, 0, BF16)[None, :, :, :]
    return _of_halves(_largest_of(pairs, 3, BF16), BF16)


@triton.jit
def _for_pairs(of_blocks, BLOCK: tl.constexpr):
    """Returns [.., C / 2]: the value of each pair's block, from `of_blocks` [.., C / BLOCK]."""
    D: tl.constexpr = of_blocks.shape[0]
    G: tl.constexpr = of_blocks.shape[1]
    B: tl.constexpr = of_blocks.shape[2]
    return tl.reshape(
        tl.broadcast_to(of_blocks[:, :, :, None], (D, G, B, BLOCK // 2)), (D, G, B * (BLOCK // 2))
    )


@triton.jit
def row_scales(
    even, odd, tensor_gain,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ROUNDING: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Returns scale bytes uint8 [R, G, C / BLOCK] of blocks along rows, and factors [R, G, C / 2] of pairs.

    tensor_gain: `gain` of the tensor, for nvfp4.
    """
    amax = _blocks_largest(even, odd, BLOCK, SQUARE, BF16)
    byte, factor = _scale(amax, tensor_gain, TWO_LEVEL, ROUNDING, PTX)
    byte = tl.broadcast_to(byte, (even.shape[0], byte.shape[1], byte.shape[2]))
    return byte, tl.broadcast_to(_for_pairs(factor, BLOCK), even.shape)


@triton.jit
def column_scales(
    even, odd, tensor_gain,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ROUNDING: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Returns uint8 scales [G, C] of blocks along columns; factors [1, G, C / 2] of even and odd columns."""
    if SQUARE:
        amax = _blocks_largest(even, odd, BLOCK, True, BF16)
        byte, factor = _scale(amax, tensor_gain, TWO_LEVEL, ROUNDING, PTX)
        byte, factor = _for_pairs(byte, BLOCK), _for_pairs(factor, BLOCK)
        other_byte, other = byte, factor
    else:
        amax, other_amax = _columns_largest(even, odd, BF16)
        byte, factor = _scale(amax[None, :, :], tensor_gain, TWO_LEVEL, ROUNDING, PTX)
        other_byte, other = _scale(other_amax[None, :, :], tensor_gain, TWO_LEVEL, ROUNDING, PTX)
    return tl.reshape(tl.join(byte, other_byte), (even.shape[1], 2 * even.shape[2])), factor, other


@triton.jit
def column_codes(column, factor, random, STOCHASTIC: tl.constexpr, PTX: tl.constexpr):
    """Returns bytes [R / 2, G, W] of columns [R, G, W], two neighbours a byte. factor: [1, G, W]."""
    pairs = tl.reshape(column, (column.shape[0] // 2, 2, column.shape[1], column.shape[2]))
    low, high = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
    return row_codes(low, high, tl.broadcast_to(factor, low.shape), random, STOCHASTIC, PTX)


@triton.jit
def columns(even, odd):
    """Returns the bytes of all columns, [C, G, R / 2], from even and odd columns, [R / 2, G, C / 2] each."""
    both = tl.permute(tl.join(even, odd), (2, 3, 1, 0))
    return tl.reshape(both, (2 * even.shape[2], even.shape[1], even.shape[0]))


@triton.jit
def row_codes(low, high, factor, random, STOCHASTIC: tl.constexpr, PTX: tl.constexpr):
    """Returns bytes with the code of `low` · `factor` (low half) and of `high` · `factor` (high half).

    low, high: even and odd columns [R, G, C / 2] of rows. random: `random_pairs`, if STOCHASTIC.
    """
    if STOCHASTIC and PTX:
        args = [low, high, factor, random]
        return tl.inline_asm_elementwise(
            fp4_ptx.RANDOM_PAIRS,
            "=r,f,f,f,f,f,f,f,f,f,f,f,f,r,r,r,r",
            args,
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    low, high = _times(low, high, factor, factor, PTX)
    if PTX:
        args = [low, high]
        return tl.inline_asm_elementwise(
            fp4_ptx.PAIRS, "=r,f,f,f,f,f,f,f,f", args, dtype=tl.uint8, is_pure=True, pack=4
        )
    if STOCHASTIC:
        low, high = _round_by(low, random & 0xFFFF), _round_by(high, (random >> 16) & 0xFFFF)
    return (_code(_nearest(low)) | (_code(_nearest(high)) << 4)).to(tl.uint8)


@triton.jit
def _nearest(y):
    return tiles.rounded(tl.clamp(y, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL), _ELEM)


@triton.jit
def _code(value):
    """Returns the codes, int32, of E2M1 values, FP32 or NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = tl.where(magnitude == 0, 0, 1)  # 0.5 is the only value below 1
    code = tl.where(magnitude < 0x3F800000, small, (magnitude >> 22) - 252)  # exponent and a mantissa bit
    return tl.where(magnitude > tiles.INF_BITS, 0, code | ((bits >> 28) & 8))


@triton.jit
def random_pairs(counter, stream, seed, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """Returns int32 with 16 random bits for each of two neighbours along K, the first in the low half.

    counter: number of a group of four elements as in `formats.stochastic`, uint32 [R, G, C / 4], or
    [R / 4, G, W] if COLUMNS.
    """
    left = counter.to(tl.uint32)
    right = tl.full(counter.shape, 0, tl.uint32) + stream.to(tl.uint32)
    key = tl.full(counter.shape, 0, tl.uint32) + seed.to(tl.uint32)
    if PTX:
        args = [left, right, key]
        left, right = tl.inline_asm_elementwise(
            fp4_ptx.PHILOX, "=r,=r,r,r,r", args, dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        for _ in tl.static_range(_ROUNDS):
            product = left.to(tl.uint64) * _MULTIPLIER
            left = (product >> 32).to(tl.uint32) ^ key ^ right
            right = product.to(tl.uint32)
            key = key + _WEYL
        left, right = left.to(tl.int32, bitcast=True), right.to(tl.int32, bitcast=True)
    R: tl.constexpr = counter.shape[0]
    G: tl.constexpr = counter.shape[1]
    W: tl.constexpr = counter.shape[2]
    words = tl.join(left, right)
    if COLUMNS:
        pairs = tl.reshape(tl.permute(words, (0, 3, 1, 2)), (2 * R, G, W))
    else:
        pairs = tl.reshape(words, (R, G, 2 * W))
    return pairs


@triton.jit
def _round_by(y, half):
    """Returns `y`, FP32, rounded to E2M1 by `half`, 16 random bits. A result of 8 saturates to 6 later."""
    bits = (y * 2.0**-126).to(tl.int32, bitcast=True) + ((half | 1) << 6)
    return (bits & -0x400000).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _stage(even, odd, APART: tl.constexpr, PTX: tl.constexpr):
    """Returns sums and differences of rows that are `APART` rows apart, in the places of these rows."""
    R: tl.constexpr = even.shape[0]
    G: tl.constexpr = even.shape[1]
    W: tl.constexpr = even.shape[2]
    apart: tl.constexpr = (R // (2 * APART), 2, APART, G, W)
    a, b = tl.split(tl.permute(tl.reshape(even, apart), (0, 2, 3, 4, 1)))
    c, d = tl.split(tl.permute(tl.reshape(odd, apart), (0, 2, 3, 4, 1)))
    if PTX:
        even_sum, odd_sum = _two(fp4_ptx.ADD, a, c, b, d)
        even_difference, odd_difference = _two(fp4_ptx.SUBTRACT, a, c, b, d)
    else:
        even_sum, odd_sum, even_difference, odd_difference = a + b, c + d, a - b, c - d
    even = tl.permute(tl.join(even_sum, even_difference), (0, 4, 1, 2, 3))
    odd = tl.permute(tl.join(odd_sum, odd_difference), (0, 4, 1, 2, 3))
    return tl.reshape(even, (R, G, W)), tl.reshape(odd, (R, G, W))


@triton.jit
def transformed(x, SIGNS: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr):
    """Returns even and odd columns, FP32, of the random Hadamard transform of x [R, G, C] along columns.

    R: a multiple of 16. `formats.hadamard` defines the transform. Results are rounded to the dtype of x.
    """
    even, odd = split(x, BF16, SIGNS)
    for bit in tl.static_range(4):
        even, odd = _stage(even, odd, 1 << bit, PTX)
    quarter = tl.full(even.shape, 0.25, tl.float32)
    even, odd = _times(even, odd, quarter, quarter, PTX)
    if BF16:
        args = [even, odd]
        return _floats(
            tl.inline_asm_elementwise(fp4_ptx.ROUND, "=r,f,f", args, dtype=tl.int32, is_pure=True, pack=1)
        )
    return even.to(x.dtype).to(tl.float32), odd.to(x.dtype).to(tl.float32)


@triton.jit
def largest(even, odd, BF16: tl.constexpr):
    """Returns the largest magnitude of a tile, FP32 [1, 1]; NaN if an element is NaN."""
    pairs = _largest_of(_magnitudes(even, odd, BF16), 0, BF16)
    bits = tl.max(tl.max(_of_halves(pairs, BF16), 1), 0)
    return (bits + tl.zeros((1, 1), tl.int32)).to(tl.float32, bitcast=True)
