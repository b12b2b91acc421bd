"""operands: what the MX operands of a product stand for, as BF16 or FP32 matrices.

    dequantize(quantize(x)) → quantize_dequantize(x)     where the cast is in the same graph
    dequantize(quantize_cached(w)) → quantize_dequantize_cached(w)      the value is what is kept
    decode(encode(x))       → round_with(x, scale_of(x))
    dequantize(q, s)                                     of any input, a weight that is stored quantized say

The first fuses with what makes x and never becomes FP8. Each operand is made once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import WEIGHT_KEY, tensor
from mxcompile.graph.transpose import transpose, untransposed

_WITH_VALUES = {
    ops.quantize: ops.quantize_dequantize,
    ops.quantize_cached: ops.quantize_dequantize_cached,
}
"""Operators that give a cast's value, by the cast."""


class Operands:
    """Those of one graph, dequantized so far."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._values: dict[tuple[fx.Node, fx.Node, torch.dtype, bool], fx.Node] = {}

    def value(
        self, qdata: fx.Node, scale: fx.Node, dim: int, dtype: torch.dtype, like: fx.Node, word: str = ""
    ) -> fx.Node:
        """The operand in `dtype`, from its source if that is at hand, with the strides of `qdata`.

        dim: the one blocks run along, −1 or −2. word: of the format, "" for MXFP8. Made at the current
        insertion point.
        """
        qdata, scale, swapped = stored(qdata, scale)
        key = qdata, scale, dtype, True
        if key not in self._values:
            dim = -3 - dim if swapped else dim
            self._values[key] = (
                self._decoded(qdata, scale, dim, word, True, dtype, like)
                if word or _encoded(qdata, scale) is not None
                else self._emit(qdata, scale, dim, dtype, like)
            )
        value = self._values[key]
        return transpose(value, self._build) if swapped else value

    def elements(
        self, qdata: fx.Node, scale: fx.Node, dim: int, word: str, dtype: torch.dtype, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """The elements of an operand in `dtype`, which has them all, and their scales, as `value` does."""
        qdata, scale, swapped = stored(qdata, scale)
        key = qdata, scale, dtype, False
        if key not in self._values:
            dim = -3 - dim if swapped else dim
            self._values[key] = self._decoded(qdata, scale, dim, word, False, dtype, like)
        value = self._values[key]
        if swapped:
            return transpose(value, self._build), transpose(scale, self._build)
        return value, scale

    def _decoded(
        self,
        qdata: fx.Node,
        scale: fx.Node,
        dim: int,
        word: str,
        scaled: bool,
        dtype: torch.dtype,
        like: fx.Node,
    ) -> fx.Node:
        made = _encoded(qdata, scale)
        if made is not None:
            source, cast_dim, its, *seed = made.args[:5]
            arguments = (source, scale, cast_dim, its, scaled, dtype, *seed)
            return self._build.call(ops.round_with, *arguments, like=like)
        factor = scale if scaled else None
        return self._build.call(ops.decode, qdata, factor, dim, word, dtype, like=like)

    def _emit(self, qdata: fx.Node, scale: fx.Node, dim: int, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        made = qdata.args[0] if qdata.target is operator.getitem else None
        if isinstance(made, fx.Node) and made.target in _WITH_VALUES:
            square = len(made.args) > 4 and made.args[4]
            if square or scale.target is operator.getitem:
                arguments: tuple[Any, ...] = (*made.args[:4], square)
                value = self._build.call(_WITH_VALUES[made.target], *arguments, dtype, like=like)
                value.meta.update({key: made.meta[key] for key in (WEIGHT_KEY,) if key in made.meta})
                return value
        return self._build.call(ops.dequantize, qdata, scale, dim, dtype, like=like)


def _encoded(qdata: fx.Node, scale: fx.Node) -> fx.Node | None:
    """The ``encode`` that made both."""
    made = argument(qdata) if qdata.target is operator.getitem else None
    return made if made is not None and made.target is ops.encode and scale.args[:1] == (made,) else None


def stored(qdata: fx.Node, scale: fx.Node) -> tuple[fx.Node, fx.Node, bool]:
    """An operand before transposes of it; the last result is whether it is transposed.

    Tiled scales, a vector, are the same either way. Elements that were cast to lie transposed, beside scales
    that were not, stay as they are.
    """
    base, swapped = untransposed(qdata)
    value = tensor(scale)
    if value is None or value.ndim == 1:
        return base, scale, swapped
    below, scale_swapped = untransposed(scale)
    return (base, below, swapped) if swapped == scale_swapped else (qdata, scale, False)
