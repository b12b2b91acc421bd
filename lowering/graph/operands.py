"""operands: what the MX operands of a product stand for, as BF16 or FP32 matrices.

    dequantize(quantize(x))                → quantize_dequantize(x)    where the cast is in the same graph
    dequantize(quantize(dequantize(q, s))) → dequantize(q, s)          of a weight that is stored quantized
    dequantize(q, s)                                                   of any other input

The first fuses with what makes x and never becomes FP8. The second is the same value under rceil, whose scale
for a stored block is no larger and never saturates, so that every element is exact again. Other roundings may
change it. Each operand is made once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Rounding
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import tensor
from mxcompile.graph.transpose import transpose, untransposed

_EXACT = frozenset({torch.bfloat16, torch.float32})
"""Dtypes that have every FP8 element times a power of two, extreme scales aside."""


class Operands:
    """Those of one graph, dequantized so far."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._values: dict[tuple[fx.Node, fx.Node, torch.dtype], fx.Node] = {}

    def value(self, qdata: fx.Node, scale: fx.Node, dim: int, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        """The operand in `dtype`, from its source if that is at hand, with the strides of `qdata`.

        dim: the one blocks run along, −1 or −2. Made at the current insertion point.
        """
        qdata, scale, swapped = stored(qdata, scale)
        key = qdata, scale, dtype
        if key not in self._values:
            self._values[key] = self._emit(qdata, scale, -3 - dim if swapped else dim, dtype, like)
        value = self._values[key]
        return transpose(value, self._build) if swapped else value

    def _emit(self, qdata: fx.Node, scale: fx.Node, dim: int, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        made = qdata.args[0] if qdata.target is operator.getitem else None
        if isinstance(made, fx.Node) and made.target is ops.quantize:
            square = len(made.args) > 4 and made.args[4]
            if square or scale.target is operator.getitem:
                arguments: tuple[Any, ...] = (*made.args[:4], square)
                return self._build.call(ops.quantize_dequantize, *arguments, dtype, like=like)
        return self._build.call(ops.dequantize, qdata, scale, dim, dtype, like=like)


def stored(qdata: fx.Node, scale: fx.Node) -> tuple[fx.Node, fx.Node, bool]:
    """An operand as it is stored: before transposes, and before a cast that changes nothing.

    The last result is whether it is transposed. Tiled scales, a vector, are the same either way.
    """
    qdata, swapped = untransposed(qdata)
    value = tensor(scale)
    if value is not None and value.ndim > 1:
        scale, scale_swapped = untransposed(scale)
        assert swapped == scale_swapped, "elements and scales of an operand are transposed alike"
    before = _before_recast(qdata, scale)
    return (qdata, scale, swapped) if before is None else (*before, swapped)


def _before_recast(qdata: fx.Node, scale: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Elements and scales q and s, if the operand is quantize(dequantize(q, s)) in the format of q."""
    cast = qdata.args[0] if qdata.target is operator.getitem else None
    if not isinstance(cast, fx.Node) or cast.target is not ops.quantize or scale.args[:1] != (cast,):
        return None
    source, dim, elem_dtype, rounding, *options = cast.args
    if not isinstance(source, fx.Node) or source.target is not ops.dequantize or any(options[:1]):
        return None
    q, s = argument(source, 0), argument(source, 1)
    values, scales, again = tensor(q), tensor(s), tensor(scale)
    assert values is not None
    assert scales is not None
    assert again is not None
    same = values.dtype is elem_dtype and scales.ndim == again.ndim == values.ndim
    same = same and (int(dim) - int(source.args[2])) % values.ndim == 0  # type: ignore[arg-type]
    return (q, s) if same and rounding == Rounding.RCEIL and source.args[3] in _EXACT else None
