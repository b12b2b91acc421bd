"""Elements in Inductor's operators: rounding to them, and what stands for them where they do not exist.

    way         rounding of y, |y| ≤ max or NaN                          for
    chip        a cast to FP8 and back                                   chips whose conversion rounds once
    integers    on the bits: add half a step and the last kept bit       other GPUs
    FP32        t = y·(2^(23−p) + 1), t − (t − y)                        CPU: vectorized with the rest

The last is Veltkamp's splitting for p stored bits. It needs the product and the difference rounded apart, so
it is not used where a compiler may contract them. Below the smallest normal the last two are (y + c) − c,
which rounds to the fixed step of the subnormals. All are checked on every pattern in the tests.

Where Triton has no tensors of the type, their codes are bytes, and a view made outside of the kernels is the
FP8 tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import ops as inductor

from mxcompile.formats import E4M3, ElemType
from mxcompile.lowering.targets import Target

Load = Callable[[Sequence[Any]], Any]

_F32, _I32 = torch.float32, torch.int32
_ABSOLUTE = 0x7FFFFFFF
_INFINITY = 0x7F800000


def f32(value: float) -> Any:
    """A constant."""
    return inductor.constant(value, _F32)


def i32(value: int) -> Any:
    """A constant."""
    return inductor.constant(value, _I32)


def quotient(a: Any, b: Any) -> Any:
    """A / b in FP32, rounded to nearest; older PyTorch, without the operator, does so from FP64, the same."""
    if hasattr(OpsHandler, "div_rn"):
        return inductor.div_rn(a, b)
    wide = (inductor.to_dtype(each, torch.float64, src_dtype=torch.float32) for each in (a, b))
    return inductor.to_dtype(inductor.truediv(*wide), torch.float32, src_dtype=torch.float64)


def clamped(y: Any, largest: float) -> Any:
    """`y`, FP32, within ±`largest`; NaN stays. By comparisons (see `lowering.kernels.tiles`)."""
    y = inductor.where(inductor.gt(y, f32(largest)), f32(largest), y)
    return inductor.where(inductor.lt(y, f32(-largest)), f32(-largest), y)


def rounded(y: Any, elem: ElemType, target: Target) -> Any:
    """`y`, FP32, |y| ≤ max or NaN, to nearest even in `elem`, as FP32; keeps the sign of 0."""
    if target.encodes_fp8 and not elem.is_coded:
        return inductor.to_dtype(inductor.to_dtype(y, elem.dtype), _F32)
    on_cpu = target.device == "cpu"
    normal = _split(y, elem) if on_cpu else _round_bits(y, elem)
    magic = f32(1.5 * 2.0**23 * _step(elem))
    subnormal = inductor.sub(inductor.add(y, magic), magic)
    subnormal = inductor.copysign(subnormal, y) if on_cpu else with_sign(subnormal, y)
    return inductor.where(inductor.lt(inductor.abs(y), f32(2.0**elem.min_exponent)), subnormal, normal)


def with_sign(value: Any, y: Any) -> Any:
    """`value`, of the sign of `y` or 0, with that sign."""
    bits = inductor.bitwise_and(inductor.to_dtype_bitcast(y, _I32, _F32), i32(-(1 << 31)))
    bits = inductor.bitwise_or(inductor.to_dtype_bitcast(value, _I32, _F32), bits)
    return inductor.to_dtype_bitcast(bits, _F32, _I32)


def _step(elem: ElemType) -> float:
    """Distance of subnormal values."""
    return 2.0 ** (elem.min_exponent - elem.mantissa_bits)


def _split(y: Any, elem: ElemType) -> Any:
    split = inductor.mul(y, f32(2.0 ** (23 - elem.mantissa_bits) + 1.0))
    return inductor.sub(split, inductor.sub(split, y))


def _round_bits(y: Any, elem: ElemType) -> Any:
    dropped = 23 - elem.mantissa_bits
    bits = inductor.to_dtype_bitcast(y, _I32, _F32)
    last = inductor.bitwise_and(inductor.bitwise_right_shift(bits, i32(dropped)), i32(1))
    half = inductor.add(i32((1 << (dropped - 1)) - 1), last)
    kept = inductor.bitwise_and(inductor.add(bits, half), i32(-(1 << dropped)))
    value = inductor.to_dtype_bitcast(kept, _F32, _I32)
    return inductor.where(inductor.ne(y, y), y, value)  # the bits of a NaN may overflow


def store(value: Any, elem: ElemType, target: Target) -> Any:
    """Returns the stored form of `value`, which `rounded` made: FP8, or the code as a byte."""
    if target.stores_fp8 and not elem.is_coded:
        return inductor.to_dtype(value, elem.dtype)
    bits = inductor.to_dtype_bitcast(value, _I32, _F32)
    magnitude = inductor.bitwise_and(bits, i32(_ABSOLUTE))
    normal = inductor.sub(
        inductor.bitwise_right_shift(magnitude, i32(23 - elem.mantissa_bits)),
        i32((126 + elem.min_exponent) << elem.mantissa_bits),
    )
    steps = inductor.mul(inductor.abs(value), f32(1 / _step(elem)))
    is_subnormal = inductor.lt(inductor.abs(value), f32(2.0**elem.min_exponent))
    # of a NaN or a normal value the number of steps is not used, and may not fit
    subnormal = inductor.to_dtype(inductor.where(is_subnormal, steps, f32(0.0)), _I32)
    code = inductor.where(is_subnormal, subnormal, normal)
    is_nan = inductor.gt(magnitude, i32(_INFINITY))
    code = inductor.where(is_nan, i32(0x7F), code)
    sign_bit = 1 << (elem.bits - 1)
    sign = inductor.bitwise_and(inductor.bitwise_right_shift(bits, i32(32 - elem.bits)), i32(sign_bit))
    code = inductor.bitwise_or(code, sign)
    if elem.is_coded:  # the scale says NaN
        code = inductor.where(is_nan, i32(0), code)
    return inductor.to_dtype(code, torch.uint8)


def stored_dtype(elem: ElemType, target: Target) -> torch.dtype:
    """The dtype of what `store` gives."""
    return elem.dtype if target.stores_fp8 else torch.uint8


def as_fp8(stored: ir.TensorBox, elem: ElemType, target: Target) -> ir.TensorBox:
    """The FP8 tensor of what `store` gave."""
    return stored if target.stores_fp8 or elem.is_coded else _viewed(stored, elem.dtype)


def loader(qdata: ir.TensorBox, elem: ElemType, target: Target) -> Load:
    """Loads elements of `qdata`, an FP8 tensor, as FP32."""
    if target.stores_fp8 and not elem.is_coded:
        load = qdata.make_loader()
        return lambda index: inductor.to_dtype(load(index), _F32)
    codes = (qdata if elem.is_coded else _viewed(qdata, torch.uint8)).make_loader()
    return lambda index: _decoded(inductor.to_dtype(codes(index), _I32), elem)


def fnuz_code(value: Any, code: Any, elem: ElemType) -> Any:
    """The byte of half of `value`, of which `code` is the byte, in a type without a negative 0."""
    code = inductor.where(inductor.eq(value, f32(0.0)), i32(0), code)
    finite = inductor.le(inductor.abs(value), f32(elem.max))
    return inductor.to_dtype(inductor.where(finite, code, i32(0x80)), torch.uint8)


def as_dtype(codes: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    """Bytes as a tensor of another type of one byte, by a view outside of kernels."""
    return _viewed(codes, dtype)


def _viewed(x: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    return ir.TensorBox.create(ir.FallbackKernel.create(torch.ops.aten.view.dtype, x, dtype))


def _decoded(code: Any, elem: ElemType) -> Any:
    """FP32 of a code, int32."""
    sign_bit = 1 << (elem.bits - 1)
    magnitude = inductor.bitwise_and(code, i32(sign_bit - 1))
    bits = inductor.bitwise_left_shift(magnitude, i32(23 - elem.mantissa_bits))
    special = (
        sign_bit if elem.is_coded else 0x7F if elem is E4M3 else 0x7C
    )  # the first code that is no number
    bits = inductor.where(
        inductor.ge(magnitude, i32(special)),
        inductor.bitwise_or(bits, i32(_INFINITY)),
        inductor.add(bits, i32((126 + elem.min_exponent) << 23)),
    )
    normal = inductor.to_dtype_bitcast(bits, _F32, _I32)
    subnormal = inductor.mul(inductor.to_dtype(magnitude, _F32), f32(_step(elem)))
    is_subnormal = inductor.lt(magnitude, i32(1 << elem.mantissa_bits))
    value = inductor.where(is_subnormal, subnormal, normal)
    negative = inductor.gt(inductor.bitwise_and(code, i32(sign_bit)), i32(0))
    return inductor.where(negative, inductor.mul(value, f32(-1.0)), value)  # Triton negates 0 to 0
