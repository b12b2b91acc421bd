"""The FP8 cast with FP32 scales on register tiles: Triton device functions that the templates call.

    scale    amax / max; 1 where that is 0, NaN where amax is not finite; with POW2 the next power of two
    y        x / scale, rounded to FP32 as a division rounds          see `quotient`
    code     FP8 bits of round-to-nearest-even(y), saturated to ±max

Bit-exact with ``formats.encoding``. A division takes 10 instructions. Here each scale takes one division, and
each element multiplications and a correction (Markstein): with s' = s · p, 1 ≤ s' < 2, p a power of two,
a = −x · p and r = −1 / s' rounded to nearest,

    q = a · r        q ← q + (q · s' + a) · r        each with one rounding

After one correction q differs from the rounded quotient only if the exact quotient is within 2^−22 of the
midpoint of two FP32 numbers. For sources with 8 or 11 mantissa bits no such quotient is next to a number at
which FP8 rounds the other way (2·X = S·(M·2^20 ± 1) has no such X). For FP32 sources, a second correction
gives the rounded quotient. With these signs −0 stays −0. Not here: memory, masks, strides.

Source: P. Markstein, Computation of elementary functions on the IBM RISC System/6000, IBM J. R&D 34 (1990).

Compile-time arguments as in `tiles`, and

    WIDE      whether sources are FP32
    STATEFUL  whether the scale comes from earlier steps (delayed scaling): an element that is not finite
              becomes NaN alone, and an element beyond the scale's range saturates
    FNUZ      whether codes are MI300's, which have half the value: −0 becomes 0, NaN becomes 0x80
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import tiles


@triton.jit
def scale_of(amax, ELEM: tl.constexpr, POW2: tl.constexpr):
    """Returns the FP32 scales of maxima, FP32."""
    if POW2:
        scale = tiles.scale_value(tiles.scale_byte(tiles.magnitude_bits(amax), ELEM, "rceil"))
        scale = tl.where(amax == 0.0, 1.0, scale)
    else:
        LARGEST: tl.constexpr = tiles.largest_value(ELEM)
        scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        scale = tl.where(scale == 0.0, 1.0, scale)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
    return scale


@triton.jit
def block_amax(x, SQUARE: tl.constexpr):
    """Returns the largest magnitude of each row of a tile, [R, 1], or of all of the tile, [1, 1]; FP32."""
    bits = tl.max(tiles.magnitude_bits(x), 1, keep_dims=True)
    if SQUARE:
        bits = tl.max(bits, 0, keep_dims=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def column_amax(x):
    """Returns the largest magnitudes of the columns of x, [1, C]."""
    return tl.max(tiles.magnitude_bits(x), 0, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def parts(scale):
    """Returns −p, s' and r of `scale`, which the module docstring defines."""
    exponent = scale.to(tl.int32, bitcast=True) >> 23
    power = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    scaled = scale * power
    return -power, scaled, tl.div_rn(tl.full(scale.shape, -1.0, tl.float32), scaled)


@triton.jit
def quotient(x, power, scaled, inverse, ELEM: tl.constexpr, WIDE: tl.constexpr, STATEFUL: tl.constexpr):
    """Returns x / scale, FP32. power, scaled, inverse: `parts` of scales that broadcast to the shape of x."""
    a = x * power
    if STATEFUL:
        LIMIT: tl.constexpr = 4.0 * tiles.largest_value(ELEM)
        a = tl.clamp(a, -LIMIT, LIMIT)  # may lose NaN, which `inverse` or the last line puts back
    scaled = tl.broadcast_to(scaled, x.shape)
    inverse = tl.broadcast_to(inverse, x.shape)
    y = a * inverse
    y = tl.fma(tl.fma(y, scaled, a), inverse, y)
    if WIDE:
        y = tl.fma(tl.fma(y, scaled, a), inverse, y)
    if STATEFUL:
        y = tl.where(tl.abs(x) < float("inf"), y, float("nan"))
    return y


@triton.jit
def encode(y, ELEM: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr, FNUZ: tl.constexpr):
    """Returns uint8 codes of `y`, elements divided by their scale. Magnitudes over the largest saturate."""
    codes = tiles.encode(y, ELEM, "floor", NATIVE, SATURATES)
    if FNUZ:
        NAN: tl.constexpr = tiles.largest_code(ELEM)
        codes = tl.where(codes == 0x80, 0, codes)
        codes = tl.where((codes & 0x7F) > NAN, 0x80, codes).to(tl.uint8)
    return codes


@triton.jit
def as_stored(codes, STORED: tl.constexpr):
    """Returns uint8 codes as Triton's FP8 type."""
    if STORED == "e4m3fnuz":
        stored = codes.to(tl.float8e4b8, bitcast=True)
    elif STORED == "e5m2fnuz":
        stored = codes.to(tl.float8e5b16, bitcast=True)
    else:
        stored = tiles.as_elem(codes, STORED)
    return stored


@triton.jit
def barrier(codes):
    """Returns `codes` through a loop with one iteration, so that the compiler does not compute them again.

    Triton before 3.7 converts their inputs to the layout of the transposed copy, and computes the codes a
    second time there.
    """
    result = tl.zeros(codes.shape, codes.dtype)
    remaining = 1
    while remaining > 0:
        result = codes
        remaining -= 1
    return result


@triton.jit
def transposed(codes, PERM: tl.constexpr):
    """Returns the transpose [C, R] of `codes` [R, C], whose rows are permuted by `order`."""
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    codes = tl.permute(tl.reshape(codes, (PERM, R // PERM, C)), (2, 1, 0))
    return tl.reshape(codes, (C, R))


@triton.jit
def order(R: tl.constexpr, PERM: tl.constexpr):
    """Returns a permutation of a tile's rows that gives each thread neighbouring rows.

    A thread holds every (R / PERM)-th row of the tile. With neighbouring rows it stores the bytes of a column
    to the transposed copy as words.
    """
    at = tl.arange(0, R)
    return at % (R // PERM) * PERM + at // (R // PERM)
