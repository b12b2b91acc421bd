"""Elements in Inductor's operators: rounding, storing and loading, also on devices without FP8 types.

    way         rounding of y, |y| ≤ max or NaN                          for
    chip        a cast to FP8 and back                                   chips whose conversion rounds once
    integers    on the bits: add half a step and the last kept bit       other GPUs
    FP32        t = y·(2^(23−p) + 1), t − (t − y)                        CPU: vectorized with the rest

The FP32 way is Veltkamp's splitting for p stored bits. The product and the difference must be rounded
separately, so it is not used where a compiler may contract them into an FMA. Below the smallest normal, the
last two ways compute (y + c) − c, which rounds to the fixed step of subnormals. Tests check every pattern.

If Triton has no tensors of the type, kernels store bytes, and a view outside of kernels is the FP8 tensor.
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
    """Returns `value` as an FP32 constant in Inductor's IR."""
    return inductor.constant(value, _F32)


def i32(value: int) -> Any:
    """Returns `value` as an int32 constant in Inductor's IR."""
    return inductor.constant(value, _I32)


def quotient(a: Any, b: Any) -> Any:
    """Returns a / b in FP32, rounded to nearest. Older PyTorch divides in FP64: the same bits."""
    if hasattr(OpsHandler, "div_rn"):
        return inductor.div_rn(a, b)
    wide = (inductor.to_dtype(operand, torch.float64, src_dtype=torch.float32) for operand in (a, b))
    return inductor.to_dtype(inductor.truediv(*wide), torch.float32, src_dtype=torch.float64)


def clamped(y: Any, largest: float) -> Any:
    """Returns `y`, FP32, clamped to ±`largest`; NaN stays. By comparisons (see `lowering.kernels.tiles`)."""
    y = inductor.where(inductor.gt(y, f32(largest)), f32(largest), y)
    return inductor.where(inductor.lt(y, f32(-largest)), f32(-largest), y)


def rounded(y: Any, elem: ElemType, target: Target) -> Any:
    """Returns `y`, FP32, |y| ≤ max or NaN, rounded to nearest even in `elem`; floats keep the sign of 0."""
    if target.encodes_fp8 and not elem.is_coded:
        return inductor.to_dtype(inductor.to_dtype(y, elem.dtype), _F32)
    magic = f32(1.5 * 2.0**23 * elem.step)
    subnormal = inductor.sub(inductor.add(y, magic), magic)
    if elem.is_integer:
        return subnormal
    on_cpu = target.device == "cpu"
    normal = _split(y, elem) if on_cpu else _round_bits(y, elem)
    subnormal = inductor.copysign(subnormal, y) if on_cpu else with_sign(subnormal, y)
    return inductor.where(inductor.lt(inductor.abs(y), f32(2.0**elem.min_exponent)), subnormal, normal)


def with_sign(value: Any, y: Any) -> Any:
    """Returns `value` with the sign of `y`. Requires that `value` is 0 or has that sign."""
    bits = inductor.bitwise_and(inductor.to_dtype_bitcast(y, _I32, _F32), i32(-(1 << 31)))
    bits = inductor.bitwise_or(inductor.to_dtype_bitcast(value, _I32, _F32), bits)
    return inductor.to_dtype_bitcast(bits, _F32, _I32)


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
    if elem.is_integer:  # integers have no NaN; the scale is NaN
        steps = inductor.mul(value, f32(1 / elem.step))
        steps = inductor.where(inductor.ne(value, value), f32(0.0), steps)
        return inductor.to_dtype(inductor.to_dtype(steps, _I32), torch.int8)
    bits = inductor.to_dtype_bitcast(value, _I32, _F32)
    magnitude = inductor.bitwise_and(bits, i32(_ABSOLUTE))
    normal = inductor.sub(
        inductor.bitwise_right_shift(magnitude, i32(23 - elem.mantissa_bits)),
        i32((126 + elem.min_exponent) << elem.mantissa_bits),
    )
    steps = inductor.mul(inductor.abs(value), f32(1 / elem.step))
    is_subnormal = inductor.lt(inductor.abs(value), f32(2.0**elem.min_exponent))
    # NaN and normal values do not use their number of steps, which may overflow int32
    subnormal = inductor.to_dtype(inductor.where(is_subnormal, steps, f32(0.0)), _I32)
    code = inductor.where(is_subnormal, subnormal, normal)
    is_nan = inductor.gt(magnitude, i32(_INFINITY))
    code = inductor.where(is_nan, i32(0x7F), code)
    sign_bit = 1 << (elem.bits - 1)
    sign = inductor.bitwise_and(inductor.bitwise_right_shift(bits, i32(32 - elem.bits)), i32(sign_bit))
    code = inductor.bitwise_or(code, sign)
    if elem.is_coded:  # elements have no NaN; the scale is NaN
        code = inductor.where(is_nan, i32(0), code)
    return inductor.to_dtype(code, torch.uint8)


def stored_dtype(elem: ElemType, target: Target) -> torch.dtype:
    """Returns the dtype of the result of `store`."""
    return elem.dtype if target.stores_fp8 or elem.is_coded else torch.uint8


def as_fp8(stored: ir.TensorBox, elem: ElemType, target: Target) -> ir.TensorBox:
    """Returns the FP8 tensor for a result of `store`; codes for other types."""
    return stored if target.stores_fp8 or elem.is_coded else as_dtype(stored, elem.dtype)


def loader(qdata: ir.TensorBox, elem: ElemType, target: Target) -> Load:
    """Returns a loader of the elements of `qdata`, as FP32."""
    if target.stores_fp8 and not elem.is_coded:
        load = qdata.make_loader()
        return lambda index: inductor.to_dtype(load(index), _F32)
    codes = (qdata if elem.is_coded else as_dtype(qdata, torch.uint8)).make_loader()
    return lambda index: _decoded(inductor.to_dtype(codes(index), _I32), elem)


def fnuz_code(value: Any, code: Any, elem: ElemType) -> Any:
    """Returns the FNUZ byte of half of `value`: its OCP byte `code`, except for −0 and NaN."""
    code = inductor.where(inductor.eq(value, f32(0.0)), i32(0), code)
    finite = inductor.le(inductor.abs(value), f32(elem.max))
    return inductor.to_dtype(inductor.where(finite, code, i32(0x80)), torch.uint8)


def as_dtype(x: ir.TensorBox, dtype: torch.dtype) -> ir.TensorBox:
    """Views bytes as another type of one byte, outside of kernels."""
    return ir.TensorBox.create(ir.FallbackKernel.create(torch.ops.aten.view.dtype, x, dtype))


def _decoded(code: Any, elem: ElemType) -> Any:
    """Returns the FP32 value of a code, int32."""
    if elem.is_integer:
        return inductor.mul(inductor.to_dtype(code, _F32), f32(elem.step))
    sign_bit = 1 << (elem.bits - 1)
    magnitude = inductor.bitwise_and(code, i32(sign_bit - 1))
    bits = inductor.bitwise_left_shift(magnitude, i32(23 - elem.mantissa_bits))
    special = sign_bit if elem.is_coded else 0x7F if elem is E4M3 else 0x7C  # the first code of Inf or NaN
    bits = inductor.where(
        inductor.ge(magnitude, i32(special)),
        inductor.bitwise_or(bits, i32(_INFINITY)),
        inductor.add(bits, i32((126 + elem.min_exponent) << 23)),
    )
    normal = inductor.to_dtype_bitcast(bits, _F32, _I32)
    subnormal = inductor.mul(inductor.to_dtype(magnitude, _F32), f32(elem.step))
    is_subnormal = inductor.lt(magnitude, i32(1 << elem.mantissa_bits))
    value = inductor.where(is_subnormal, subnormal, normal)
    negative = inductor.gt(inductor.bitwise_and(code, i32(sign_bit)), i32(0))
    # a product with −1, because Triton's negation of 0 is 0 and not −0
    return inductor.where(negative, inductor.mul(value, f32(-1.0)), value)
