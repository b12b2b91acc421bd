"""Stochastic rounding in Inductor's operators: `formats.stochastic`, operation by operation.

Products of 32-bit words are in int64, in steps that do not overflow, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops as inductor

from mxcompile.formats import ElemType
from mxcompile.formats.stochastic import MULTIPLIER, ROUNDS, WEYL
from mxcompile.lowering.inductor.elements import f32, i32, with_sign

Index = Sequence[Any]

_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64
_LOW = 0xFFFFFFFF


def i64(value: int) -> Any:
    """A constant."""
    return inductor.constant(value, _I64)


def words(shape: Sequence[Any], seed: ir.TensorBox, stream: int) -> Callable[[Index], Any]:
    """The random word of the element at an index of a tensor of `shape`, int64."""
    load = seed.make_loader()

    def word(index: Index) -> Any:
        place = sympy.S.Zero
        for at, size in zip(index, shape, strict=True):
            place = place * size + at
        key = inductor.bitwise_and(load([sympy.S.Zero]), i64(_LOW))
        return _philox(inductor.index_expr(place, _I64), stream, key)

    return word


def _philox(index: Any, stream: int, key: Any) -> Any:
    left, right = inductor.bitwise_and(index, i64(_LOW)), i64(stream & _LOW)
    for _ in range(ROUNDS):
        high, low = _multiplied(left)
        left, right = inductor.bitwise_xor(inductor.bitwise_xor(high, key), right), low
        key = inductor.bitwise_and(inductor.add(key, i64(WEYL)), i64(_LOW))
    return left


def _multiplied(x: Any) -> tuple[Any, Any]:
    half, factor = i64(16), i64(MULTIPLIER)
    low = inductor.mul(inductor.bitwise_and(x, i64(0xFFFF)), factor)
    rest = inductor.mul(inductor.bitwise_right_shift(x, half), factor)
    rest = inductor.add(rest, inductor.bitwise_right_shift(low, half))
    joined = inductor.bitwise_left_shift(inductor.bitwise_and(rest, i64(0xFFFF)), half)
    return inductor.bitwise_right_shift(rest, half), inductor.bitwise_or(
        joined, inductor.bitwise_and(low, i64(0xFFFF))
    )


def rounded(y: Any, elem: ElemType, word: Any) -> Any:
    """`y`, FP32, |y| ≤ max or NaN, rounded by `word` to a value of `elem`, in FP32; keeps the sign of 0."""
    magnitude = inductor.abs(y)
    bits = inductor.to_dtype_bitcast(magnitude, _I32, _F32)
    exponent = inductor.sub(inductor.bitwise_right_shift(bits, i32(23)), i32(127))
    exponent = inductor.minimum(inductor.maximum(exponent, i32(elem.min_exponent)), i32(elem.emax))
    shift = inductor.sub(exponent, i32(elem.mantissa_bits))
    steps = inductor.mul(magnitude, _power(inductor.sub(i32(127), shift)))
    whole = inductor.floor(steps)
    share = inductor.to_dtype(inductor.bitwise_right_shift(word, i64(8)), _F32)
    is_up = inductor.lt(inductor.mul(share, f32(2.0**-24)), inductor.sub(steps, whole))
    value = inductor.add(whole, inductor.where(is_up, f32(1.0), f32(0.0)))
    return with_sign(inductor.mul(value, _power(inductor.add(i32(127), shift))), y)


def _power(exponent: Any) -> Any:
    """2^(`exponent` − 127) in FP32."""
    return inductor.to_dtype_bitcast(inductor.bitwise_left_shift(exponent, i32(23)), _F32, _I32)
