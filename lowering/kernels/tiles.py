"""The MX cast on register tiles: Triton device functions that most kernels and templates call.

    byte     = exponent of the block's scale, from the FP32 bits of its amax (see `scale_byte`)
    code     = FP8 bits of round-to-nearest-even(x · 2^(127 − byte)), saturated to ±max
    value    = decode(code) · 2^(byte − 127)          without a code between: `round_rowwise`

Bit-exact with ``formats.numerics``: scales are integers, products with powers of two are exact in FP32,
also at byte 0 (2^127) and byte 254 (the subnormal 2^−127). FP8 elements are uint8 codes everywhere, so that
a chip without the type (sm_80) or with another FP8 type (gfx942) runs the same code; `as_elem` converts them
to the Triton type. Not here: memory, masks, strides.

Compile-time arguments, the same everywhere:

    ELEM      "e4m3" | "e5m2"; for scales and `rounded` also types with fewer bits, for `decode` also "int8"
    ROUNDING  "rceil" | "floor" | "ceil" | "even"
    NATIVE    whether the chip's own conversions are used, else integers give the same bits. Encoding: sm_90
              and up, gfx950; not sm_89, where Triton goes through FP16 and rounds twice. Decoding: sm_89 too
    SATURATES whether the chip's conversion saturates, so that no clamp precedes it

Values stored as FP8 must not come from PTX's ``max.NaN`` or ``min.NaN``, which Triton emits for operators
that propagate NaN: if such a value is stored both in rows and transposed, an H100 stores wrong bytes
(triton-lang/triton#11111). `larger` and `smaller` compare instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile import formats

BLOCK = tl.constexpr(formats.BLOCK)
SCALE_NAN = tl.constexpr(formats.SCALE_NAN)
INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_SIGN_BIT = tl.constexpr(-0x80000000)


@triton.constexpr_function
def _emax(elem):
    return formats.ELEMENTS[elem].emax


@triton.constexpr_function
def largest_value(elem):
    """Returns the largest finite value of a format."""
    return formats.ELEMENTS[elem].max


@triton.constexpr_function
def _beyond(elem):
    """Returns a constant that carries into the exponent of FP32 bits whose mantissa exceeds the largest."""
    e = formats.ELEMENTS[elem]
    return (1 << 23) - 1 - (int(e.max / 2.0**e.emax * (1 << 23)) - (1 << 23))


@triton.constexpr_function
def largest_code(elem):
    """Returns the FP8 bits of the largest finite value: biased exponent, then the mantissa of 1.75."""
    e = formats.ELEMENTS[elem]
    return ((e.emax - e.min_exponent + 1) << e.mantissa_bits) | (3 << (e.mantissa_bits - 2))


@triton.constexpr_function
def _dropped_bits(elem):
    return 23 - formats.ELEMENTS[elem].mantissa_bits


@triton.constexpr_function
def _exponent_bits(elem, above):
    """Returns the FP32 bits of 2^`above` times the smallest normal value of the format."""
    return (127 + formats.ELEMENTS[elem].min_exponent + above) << 23


@triton.constexpr_function
def _half(bits):
    return 1 << (bits - 1)


@triton.jit
def magnitude_bits(x):
    """Returns |x| as FP32 bits, int32: ordered as the values are, NaN above Inf. x: FP32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def larger(a, b):
    """Returns the larger operand; NaN if an operand is NaN."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def smaller(a, b):
    """Returns the smaller operand; NaN if an operand is NaN."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def scale_byte(amax_bits, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """Returns E8M0 bytes (int32, 0 to 255) of block maxima, given by `magnitude_bits`; 255 for NaN and Inf.

    Finite maxima give at most 253, since emax ≥ 2. The sum may overflow for NaN, which does not use it.
    """
    rounded = amax_bits
    if ROUNDING == "rceil":
        rounded += _beyond(ELEM)
    elif ROUNDING == "even":
        rounded += _half(_dropped_bits(ELEM))
    elif ROUNDING == "ceil":
        rounded += 0x7FFFFF
    else:
        tl.static_assert(ROUNDING == "floor", "ROUNDING is rceil, floor, ceil or even")
    byte = tl.maximum((rounded >> 23) - _emax(ELEM), 0)
    return tl.where(amax_bits >= INF_BITS, SCALE_NAN, byte)


@triton.jit
def inverse_scale(byte):
    """Returns 2^(127 − byte), FP32, of a `scale_byte`; NaN for 255. byte: int32, not 254."""
    bits = tl.where(byte == SCALE_NAN, _NAN_BITS, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """Returns 2^(byte − 127), FP32; NaN for 255. byte: int32 or uint8."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)  # 2^−127 is subnormal
    return tl.where(byte == SCALE_NAN, _NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def as_elem(codes, ELEM: tl.constexpr):
    """Returns uint8 codes as Triton's FP8 type, for chips that have it."""
    return codes.to(tl.float8e4nv, bitcast=True) if ELEM == "e4m3" else codes.to(tl.float8e5, bitcast=True)


@triton.jit
def _encode_integer(x, ELEM: tl.constexpr):
    """Returns FP8 codes of FP32 `x` by integer arithmetic and one FP32 addition.

    For normal results, the mantissa is rounded to nearest even in place and the exponent rebiased. For
    subnormal results, the addition of a number whose ulp is the smallest subnormal rounds.
    """
    SHIFT: tl.constexpr = _dropped_bits(ELEM)
    SMALLEST_NORMAL: tl.constexpr = _exponent_bits(ELEM, 0)
    MAGIC: tl.constexpr = _exponent_bits(ELEM, SHIFT)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    finite = tl.minimum(magnitude, INF_BITS)
    rebased = finite - _exponent_bits(ELEM, -1)
    normal = (rebased + (_half(SHIFT) - 1) + ((finite >> SHIFT) & 1)) >> SHIFT
    magic = tl.full(magnitude.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.minimum(tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal), largest_code(ELEM))
    return (tl.where(magnitude > INF_BITS, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def saturated(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """Returns scaled elements `x`, FP32, clamped to ±max; NaN stays. rceil and ceil need no clamp."""
    if ROUNDING == "floor" or ROUNDING == "even":
        LARGEST: tl.constexpr = largest_value(ELEM)
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def nearest(y, ELEM: tl.constexpr):
    """Returns the elements nearest to `y`, FP32; ties to even, any sign of zeros. y: FP32, |y| ≤ max or NaN.

    The FP32 adder rounds: the last place of 1.5 · 2^(e + 23 − m) is the step between elements with exponent e
    and m mantissa bits. Below the smallest normal value, e is its exponent.
    """
    SMALLEST_NORMAL: tl.constexpr = _exponent_bits(ELEM, 0)
    UP: tl.constexpr = (_dropped_bits(ELEM) << 23) | 0x400000  # added to the bits of 2^e: the bits of `magic`
    exponent = y.to(tl.int32, bitcast=True) & INF_BITS
    magic = (tl.maximum(exponent, SMALLEST_NORMAL) + UP).to(tl.float32, bitcast=True)
    return (y + magic) - magic


@triton.jit
def rounded(y, ELEM: tl.constexpr):
    """Returns `nearest` elements whose zeros keep their signs."""
    value = nearest(y, ELEM).to(tl.int32, bitcast=True)
    return (value | (y.to(tl.int32, bitcast=True) & _SIGN_BIT)).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    x, ELEM: tl.constexpr, ROUNDING: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr = False
):
    """Returns uint8 codes of scaled elements `x`, FP32: nearest even, saturated, NaN stays NaN."""
    if NATIVE:
        if not SATURATES:
            x = saturated(x, ELEM, ROUNDING)
        if ELEM == "e4m3":
            codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        codes = _encode_integer(x, ELEM)
    return codes


@triton.jit
def decode(codes, ELEM: tl.constexpr, NATIVE: tl.constexpr):
    """Returns FP32 values of uint8 codes, exact; NaN codes give NaN. Integers may also be int8."""
    if ELEM == "int8":
        value = codes.to(tl.int8, bitcast=True).to(tl.float32) * 0.015625
    elif NATIVE:
        value = as_elem(codes, ELEM).to(tl.float32)
    else:
        code = codes.to(tl.int32)
        if ELEM == "e4m3":
            # As FP16 bits the code means value · 2^−8, subnormals included; the NaN code would mean 480.
            half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
            is_nan = (code & 0x7F) == 0x7F
            value = tl.where(is_nan, float("nan"), half.to(tl.float32) * 256.0)
        else:
            value = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def quantize_rowwise(
    x, ELEM: tl.constexpr, ROUNDING: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr = False
):
    """Quantizes a tile [R, C] of any float type in blocks of 32 along C.

    Returns codes uint8 [R, C] and scale bytes uint8 [R, C / 32]. C: a multiple of 32.
    """
    blocks = tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // BLOCK, BLOCK))
    byte = scale_byte(tl.max(magnitude_bits(blocks), axis=2), ELEM, ROUNDING)
    scaled = tl.reshape(blocks * inverse_scale(byte)[:, :, None], x.shape)
    return encode(scaled, ELEM, ROUNDING, NATIVE, SATURATES), byte.to(tl.uint8)


@triton.jit
def quantize_columnwise(
    x, ELEM: tl.constexpr, ROUNDING: tl.constexpr, NATIVE: tl.constexpr, SATURATES: tl.constexpr = False
):
    """Quantizes a tile [R, C] of any float type in blocks of 32 along R.

    Returns codes uint8 [R, C] and scale bytes uint8 [R / 32, C]. R: a multiple of 32.
    """
    blocks = tl.reshape(x.to(tl.float32), (x.shape[0] // BLOCK, BLOCK, x.shape[1]))
    byte = scale_byte(tl.max(magnitude_bits(blocks), axis=1), ELEM, ROUNDING)
    scaled = tl.reshape(blocks * inverse_scale(byte)[:, None, :], x.shape)
    return encode(scaled, ELEM, ROUNDING, NATIVE, SATURATES), byte.to(tl.uint8)


@triton.jit
def round_rowwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """Returns the values of a tile [R, C], quantized in blocks of 32 along C: FP32, exact."""
    blocks = tl.reshape(x.to(tl.float32), (x.shape[0], x.shape[1] // BLOCK, BLOCK))
    byte = scale_byte(tl.max(magnitude_bits(blocks), axis=2), ELEM, ROUNDING)
    values = rounded(saturated(blocks * inverse_scale(byte)[:, :, None], ELEM, ROUNDING), ELEM)
    return tl.reshape(values * scale_value(byte)[:, :, None], x.shape)


@triton.jit
def round_columnwise(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """`round_rowwise` in blocks of 32 along R."""
    blocks = tl.reshape(x.to(tl.float32), (x.shape[0] // BLOCK, BLOCK, x.shape[1]))
    byte = scale_byte(tl.max(magnitude_bits(blocks), axis=1), ELEM, ROUNDING)
    values = rounded(saturated(blocks * inverse_scale(byte)[:, None, :], ELEM, ROUNDING), ELEM)
    return tl.reshape(values * scale_value(byte)[:, None, :], x.shape)


@triton.jit
def round_square(x, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """`round_rowwise` in squares of 32×32."""
    squares = tl.reshape(x.to(tl.float32), (x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK))
    byte = scale_byte(tl.max(tl.max(magnitude_bits(squares), axis=3), axis=1), ELEM, ROUNDING)
    values = rounded(saturated(squares * inverse_scale(byte)[:, None, :, None], ELEM, ROUNDING), ELEM)
    return tl.reshape(values * scale_value(byte)[:, None, :, None], x.shape)


@triton.jit
def dequantize_rowwise(codes, scale, ELEM: tl.constexpr, NATIVE: tl.constexpr):
    """Returns FP32 [R, C] of codes uint8 [R, C] and scale bytes [R, C / 32], exact."""
    blocks = tl.reshape(decode(codes, ELEM, NATIVE), (codes.shape[0], codes.shape[1] // BLOCK, BLOCK))
    return tl.reshape(blocks * scale_value(scale)[:, :, None], codes.shape)


@triton.jit
def swizzled_offset(row, column, columns):
    """Returns the offset of a row's scale of block `column` in the 128×4 tiled layout of Blackwell's MMA.

    columns: number of blocks in a row, not padded. Tiles of 128 rows by 4 blocks are 512 contiguous bytes,
    row-major among themselves; inside, byte (r, c) is at (r mod 32) · 16 + (r div 32) · 4 + c.
    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    tile = (row // 128).to(tl.int64) * ((columns + 3) // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
