"""Stochastic rounding in Inductor's operators, with the operations of `formats.stochastic`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile.formats import ElemType
from mxcompile.formats.stochastic import MULTIPLIER, NEIGHBOURS, ROUNDS, SEEDS, WEYL
from mxcompile.lowering.inductor.blocks import Index
from mxcompile.lowering.inductor.elements import f32, i32, with_sign

_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


def i64(value: int) -> Any:
    """Returns `value` as an int64 constant in Inductor's IR."""
    return inductor.constant(value, _I64)


def _low(x: Any) -> Any:
    return inductor.bitwise_and(x, i64(SEEDS - 1))


def halves(shape: Sequence[Any], dim: int, seed: ir.TensorBox, stream: int) -> Callable[[Index], Any]:
    """Returns a loader of 16 random bits, int32, for each element of a tensor contracted along `dim`."""
    load, at = seed.make_loader(), dim % len(shape)
    groups = [*shape[:at], FloorDiv(shape[at] + (NEIGHBOURS - 1), NEIGHBOURS), *shape[at + 1 :]]
    apart = sympy_product(groups[at + 1 :])

    def half(index: Index) -> Any:
        others = sympy.S.Zero
        for number, size in enumerate(groups):
            others = others * size + (index[number] if number != at else 0)
        along = inductor.index_expr(index[at], _I64)
        group = inductor.mul(inductor.bitwise_right_shift(along, i64(2)), inductor.index_expr(apart, _I64))
        counter = inductor.add(inductor.index_expr(others, _I64), group)
        left, right = _philox(counter, stream, _low(load([sympy.S.Zero])))
        is_right = inductor.ne(inductor.bitwise_and(along, i64(2)), i64(0))
        word = inductor.where(is_right, right, left)
        is_high = inductor.ne(inductor.bitwise_and(along, i64(1)), i64(0))
        bits = inductor.where(is_high, inductor.bitwise_right_shift(word, i64(16)), word)
        return inductor.to_dtype(inductor.bitwise_and(bits, i64(0xFFFF)), _I32)

    return half


def _philox(counter: Any, stream: int, key: Any) -> tuple[Any, Any]:
    left, right = _low(counter), i64(stream & (SEEDS - 1))
    for _ in range(ROUNDS):
        part = inductor.mul(left, i64(MULTIPLIER - SEEDS))
        high = _low(inductor.add(inductor.bitwise_right_shift(part, i64(32)), left))
        left, right = inductor.bitwise_xor(inductor.bitwise_xor(high, key), right), _low(part)
        key = _low(inductor.add(key, i64(WEYL)))
    return left, right


def rounded(y: Any, elem: ElemType, half: Any) -> Any:
    """Returns `y` rounded to a value of `elem` by random bits. The sign of 0 stays, except in integers.

    y: FP32, NaN or at most the largest element. half: 16 random bits.
    """
    least, kept = f32(2.0**elem.min_exponent), 23 - elem.mantissa_bits
    magnitude = inductor.abs(y)
    small = inductor.lt(magnitude, least)
    z = inductor.where(small, inductor.add(magnitude, least), magnitude)
    noise = inductor.bitwise_left_shift(inductor.bitwise_or(half, i32(1)), i32(kept - 16))
    bits = inductor.add(inductor.to_dtype_bitcast(z, _I32, _F32), noise)
    bits = inductor.bitwise_and(bits, i32(-(1 << kept)))
    value = inductor.to_dtype_bitcast(bits, _F32, _I32)
    value = inductor.where(small, inductor.sub(value, least), value)
    signed = with_sign(value, y)
    if elem.is_integer:
        signed = inductor.where(inductor.eq(value, f32(0.0)), value, signed)
    return inductor.where(inductor.ne(y, y), y, signed)
