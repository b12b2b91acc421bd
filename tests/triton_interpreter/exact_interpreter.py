"""Makes Triton's interpreter compute what a GPU computes; a pytest plugin for ``TRITON_INTERPRET=1``.

As shipped (3.6 to 3.9) the interpreter truncates casts to FP8 and BF16, does not saturate them, does BF16
arithmetic on the bit patterns as if they were integers, and has no ``dot_scaled`` before 3.8. Replaced here:

    casts between floats   ml_dtypes; to FP8 nearest even and saturating, as `cvt.rn.satfinite`, NaN kept
    BF16 arithmetic        in FP32, rounded once
    tl.dot                 operands widened to FP32
    tl.dot_scaled          dequantized in FP32 and multiplied there; E2M1 packed along K, scales E8M0 or E4M3
    tl.fma                 one rounding
    tl.minimum, maximum    the number beside a NaN, unless NaN is to propagate
    loop bounds            Triton 3.6 makes integers of them in a way that NumPy has since forbidden
    inline PTX             of ``packed``, ``fp4_ptx`` and ``fp4_values`` in ``lowering.kernels``, by its
                           text; any other is an error as before
    tl.reduce              with a function of ours, a slice at a time

`check_interpreter.py` holds the self-test. Anything this file does not cover is left to Triton.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

from mxcompile.formats import ELEM_TYPES
from mxcompile.formats.stochastic import MULTIPLIER, ROUNDS, WEYL
from mxcompile.lowering.kernels import fp4_ptx, fp4_values, packed

NUMPY = {
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "bf16": tl.bfloat16, "fp16": tl.float16}
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_triton_convert = interpreter._convert_float
_triton_binary = _Builder.binary_op
_triton_unary = _Builder.unary_op
_triton_dot = _Builder.create_dot
_triton_dot_scaled = TritonSemantic.dot_scaled
_triton_patch_tensor = interpreter._patch_lang_tensor


def pytest_configure() -> None:
    """Install the repair for the whole session."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    np.seterr(all="ignore")  # overflow and NaN are results here, not accidents
    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = _patch_tensor
    _Builder.binary_op = _binary
    _Builder.unary_op = _unary
    _Builder.create_fma = _fma
    _Builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    _Builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    _Builder.create_dot = _dot
    _Builder.create_inline_asm = _inline_asm
    interpreter.ReduceOps.generic_reduce = _reduce
    _Builder.create_dot_scaled = _dot_scaled
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        TritonSemantic.dot_scaled = _semantic_dot_scaled


def convert(x, source, target, rounding_mode):
    """The bits `x` of Triton type `source` as bits of `target`, nearest even; FP8 saturates."""
    truncate = rounding_mode is not None and rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
    if source not in NUMPY or target not in NUMPY or truncate:
        return _triton_convert(x, source, target, rounding_mode)
    value = np.ascontiguousarray(x).view(NUMPY[source])
    if source not in (tl.float32, tl.float64):
        value = value.astype(np.float32)  # exact
    if target in _LARGEST:
        largest = _LARGEST[target]
        value = np.where(np.isnan(value), value, np.clip(value, -largest, largest))
    return value.astype(NUMPY[target]).view(f"uint{target.primitive_bitwidth}").reshape(x.shape)


def _patch_tensor(tensor, scope) -> None:
    _triton_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _is_bf16(handle) -> bool:
    return isinstance(handle, _Handle) and handle.dtype.scalar == tl.bfloat16


def _widened(handle):
    if not _is_bf16(handle):
        return handle
    value = np.ascontiguousarray(handle.data).view(NUMPY[tl.bfloat16])
    return _Handle(value.astype(np.float32), tl.float32)


def _narrowed(handle):
    return _Handle(handle.data.astype(NUMPY[tl.bfloat16]).view(np.uint16), tl.bfloat16)


def _binary(self, left, right, op):
    if not (_is_bf16(left) and _is_bf16(right)):
        return _triton_binary(self, left, right, op)
    result = _triton_binary(self, _widened(left), _widened(right), op)
    return result if op in _COMPARISONS else _narrowed(result)


def _unary(self, argument, op):
    if not _is_bf16(argument):
        return _triton_unary(self, argument, op)
    return _narrowed(_triton_unary(self, _widened(argument), op))


def fma(x, y, z):
    """x · y + z of FP32 arrays, rounded once: the product is exact in FP64, the sum rounded to odd there."""
    product, z = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(np.float32)


def _fma(self, x, y, z):
    arrays = (np.ascontiguousarray(np.asarray(handle.data, np.float32)) for handle in (x, y, z))
    return _Handle(fma(*np.broadcast_arrays(*arrays)), tl.float32)


def _dot(self, a, b, accumulator, *arguments):
    return _triton_dot(self, _widened(a), _widened(b), accumulator, *arguments)


def _values(handle, fmt, axis):
    """FP32 elements of an operand; packed ones lie along `axis`, the first in the low half of a byte."""
    word = str(fmt).rpartition(".")[2].lower()
    if word != "e2m1":
        kind = _FORMATS[word]
        bits = np.ascontiguousarray(handle.data).view(f"uint{kind.primitive_bitwidth}")
        return bits.view(NUMPY[kind]).astype(np.float32)
    bits = np.ascontiguousarray(handle.data).view(np.uint8)
    codes = np.stack([bits & 0xF, bits >> 4], bits.ndim if axis == -1 else bits.ndim - 1)
    shape = list(bits.shape)
    shape[axis] *= 2
    return codes.reshape(shape).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def _dequantized(handle, scale, fmt, axis):
    """FP32 values of an operand whose contraction runs along `axis`, −1 or −2; scales are [rows, blocks]."""
    value = _values(handle, fmt, axis)
    if scale is None:
        return value
    byte = np.ascontiguousarray(scale.data).view(np.uint8)
    if scale.dtype.scalar == tl.float8e4nv:  # without a sign, as the instruction reads them
        factor = (byte & 0x7F).view(NUMPY[tl.float8e4nv]).astype(np.float32)
    else:
        factor = np.where(byte == 255, np.nan, np.ldexp(1.0, byte.astype(np.int32) - 127)).astype(np.float32)
    factor = np.repeat(factor, value.shape[axis] // byte.shape[-1], axis=-1)
    return value * (factor if axis == -1 else np.swapaxes(factor, -1, -2))


def _dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *arguments):
    *_, a_packed, b_packed, accumulator = arguments
    assert a_packed
    assert b_packed
    left, right = _dequantized(a, a_scale, a_format, -1), _dequantized(b, b_scale, b_format, -2)
    return _Handle(np.matmul(left, right, dtype=np.float32) + accumulator.data, tl.float32)


def _halves(word):
    return np.ascontiguousarray(word).view(np.uint16)


def _larger(a, b):
    """`max.u16x2`."""
    return np.maximum(_halves(a), _halves(b)).view(np.int32)


def _special(word):
    """`add.u32` of 0x0080 to each half, then `prmt` with the sign of each half's upper byte in both."""
    moved = _halves(np.ascontiguousarray(word) + np.int32(0x00800080))
    return np.where(moved >> 15, 0xFFFF, 0).astype(np.uint16).view(np.int32)


def _rounded(x):
    """`cvt.rn.bf16x2.f32`: nearest even, as `convert`."""
    return convert(x.view(np.uint32), tl.float32, tl.bfloat16, None)


def _encoded(elem):
    """`mul.rn.bf16x2`, subnormals kept, then `cvt.rn.satfinite` to FP8, whose NaN is 0x7F."""

    def encode(x, factor):
        wide = [bits.view(NUMPY[tl.bfloat16]).astype(np.float32) for bits in (x, factor)]
        product = (wide[0] * wide[1]).astype(NUMPY[tl.bfloat16]).astype(np.float32)
        codes = convert(product.view(np.uint32), tl.float32, elem, None)
        return np.where(np.isnan(product), 0x7F, codes).astype(np.uint8)

    return encode


def _bf16(bits):
    return np.ascontiguousarray(bits).view(NUMPY[tl.bfloat16])


def _value(name, saturates):
    """Each instruction of `packed.VALUE`; those of BF16 round once, as ml_dtypes' do."""
    elem = ELEM_TYPES[name]
    least = (elem.min_exponent + 127) << 7
    up = ((7 - elem.mantissa_bits) << 7) + 0x40

    def value(x, factor, scale):
        y = _bf16(x) * _bf16(factor)
        if saturates:
            y = np.clip(y.astype(np.float32), -elem.max, elem.max).astype(y.dtype)  # NaN stays
        bits = y.view(np.uint16)
        magic = _bf16(np.maximum(bits & 0x7F80, least).astype(np.uint16) + np.uint16(up))
        rounded = ((y + magic) - magic).view(np.uint16) | (bits & 0x8000)
        return (_bf16(rounded) * _bf16(scale)).view(np.uint16)

    return value


def _sigmoid(x):
    """The value that the chip's instructions are within `packed.sigmoid`'s bound of."""
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)


def _pairs(low, high):
    """`cvt.rn.satfinite.e2m1x2.f32`: nearest even, saturating; NaN is the largest."""
    fp4 = np.dtype(ml_dtypes.float4_e2m1fn)
    codes = (np.clip(y, -6.0, 6.0).astype(fp4).view(np.uint8) for y in (low, high))
    low, high = (np.where(np.isnan(y), 7, code) & 0xF for y, code in zip((low, high), codes, strict=True))
    return (low | high << 4).astype(np.uint8)


def _decoded(nibble):
    """Code s·e·m in FP16, whose exponent it shares but for the bias: a shift, as the PTX does."""

    def decode(codes):
        code = (codes >> (4 * nibble) & 15).astype(np.uint16)
        return ((code & 8) << 12 | (code & 7) << 9).astype(np.uint16).view(np.float16)

    return decode


def _times(nibble):
    """`fma.rn.bf16x2` with −0 twice: by 2^126, which is exact, and by the factor."""

    def times(codes, factors):
        value = (codes >> (4 * nibble) & 15).astype(np.uint8).view(np.dtype(ml_dtypes.float4_e2m1fn))
        products = value.astype(np.float32) * _bf16(factors).astype(np.float32)
        return products.astype(NUMPY[tl.bfloat16]).view(np.uint16)

    return times


def _of_pairs(operation):
    """An instruction of two FP32 numbers in one register pair, `f32x2`: each by itself, rounded once."""

    def both(a, b, c, d):
        return operation(a, c), operation(b, d)

    return both


def _round_pair(low, high):
    """`cvt.rn.bf16x2.f32`."""
    low, high = (np.ascontiguousarray(_rounded(y)).astype(np.uint32) for y in (low, high))
    return (low | high << 16).view(np.int32)


def _reciprocal(x):
    """1 / x to nearest, which the sequence is for numbers of this range; a zero is Inf, then NaN."""
    small = x < np.float32(2.0**-126)
    assert not ((x > 0) & small).any(), "subnormals count as 0 here"
    assert not (x >= np.float32(2.0**126)).any()
    return np.where(small, np.float32(np.nan), np.float32(1.0) / x).astype(np.float32)


def _philox(counter, stream, key):
    """Each instruction of `fp4_ptx.PHILOX`."""
    left, right, key = (
        np.ascontiguousarray(operand).view(np.uint32).astype(np.uint64) for operand in (counter, stream, key)
    )
    for _ in range(ROUNDS):
        product = left * np.uint64(MULTIPLIER)
        left, right = (product >> 32) ^ key ^ right, product & 0xFFFFFFFF
        key = (key + WEYL) & 0xFFFFFFFF
    return tuple(word.astype(np.uint32).view(np.int32) for word in (left, right))


def _random_pairs(low, high, factor, word):
    """Each instruction of `fp4_ptx.RANDOM_PAIRS`."""

    def rounded(y, half):
        bits = (y * factor * np.float32(2.0**-126)).view(np.uint32) + (half | 1) * np.uint32(64)
        return (bits & np.uint32(0xFFC00000)).view(np.float32) * np.float32(2.0**126)

    word = word.view(np.uint32)
    return _pairs(rounded(low, word & 0xFFFF), rounded(high, word >> 16))


_FP8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
_PTX = {
    packed.LARGER.value: (tl.int32, _larger),
    packed.SPECIAL.value: (tl.int32, _special),
    packed.ROUND.value: (tl.bfloat16, _rounded),
    packed.SIGMOID.value: (tl.float32, _sigmoid),
    **{asm: (tl.float16, _decoded(nibble)) for nibble, asm in enumerate(fp4_values.DECODED)},
    **{asm: (tl.bfloat16, _times(nibble)) for nibble, asm in enumerate(fp4_values.SCALED)},
    fp4_ptx.PAIRS.value: (tl.uint8, _pairs),
    fp4_ptx.ADD.value: (tl.float32, _of_pairs(np.add)),
    fp4_ptx.SUBTRACT.value: (tl.float32, _of_pairs(np.subtract)),
    fp4_ptx.MULTIPLY.value: (tl.float32, _of_pairs(np.multiply)),
    fp4_ptx.ROUND.value: (tl.int32, _round_pair),
    fp4_ptx.RECIPROCAL.value: (tl.float32, _reciprocal),
    fp4_ptx.PHILOX.value: (tl.int32, _philox),
    fp4_ptx.RANDOM_PAIRS.value: (tl.uint8, _random_pairs),
    **{
        asm[name]: (tl.uint8, _encoded(_FP8[name]))
        for name in ELEM_TYPES
        for asm in (packed.ENCODE, packed.ENCODE_WIDE)
    },
    **{asm: (tl.bfloat16, _value(*key)) for key, asm in packed.VALUE.items()},
}


class _Results:
    def __init__(self, handles):
        self.handles = handles

    def get_result(self, index):
        return self.handles[index]


def _inline_asm(self, asm, constraints, values, types, is_pure, pack):
    if asm not in _PTX:  # code that nobody gave a meaning must not pass for checked
        raise NotImplementedError(f"no meaning is known of this PTX:\n{asm}")
    dtype, meaning = _PTX[asm]
    data = [np.ascontiguousarray(value.data) for value in values]
    results = meaning(*data)
    results = results if isinstance(results, tuple) else (results,)
    return _Results([_Handle(result.reshape(data[0].shape), dtype) for result in results])


def _reduce(self, tensors):
    """`combine_fn` of whole slices, first to last; Triton's own goes element by element."""
    data = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in tensors]

    def slices(index):
        return [self.to_tensor(part[index], tensor.dtype) for part, tensor in zip(data, tensors, strict=True)]

    result = tuple(slices(0))
    for index in range(1, len(data[0])):
        combined = self.combine_fn.fn(*result, *slices(index))
        result = combined if isinstance(combined, tuple) else (combined,)
    assert not self.keep_dims
    return list(result)


def _semantic_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *arguments):
    def wrapped(fmt):
        return tl.constexpr(fmt) if isinstance(fmt, str) else fmt

    return _triton_dot_scaled(self, a, a_scale, wrapped(a_format), b, b_scale, wrapped(b_format), *arguments)
