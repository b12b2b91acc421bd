"""operands: the dequantized operands of a product, as BF16 or FP32 matrices.

    decode(cast(x))         → cast(x) to values          if the cast is in the same graph (casts to formats
                                                         other than MXFP8 also return their scales)
    decode(q, s)                                         if the operand is an input, as a stored weight is
    decode(codes of p, s)   → decode(p, s)               if its codes are packed

A cast to values fuses with the producer of x, and FP8 is never stored. Each operand is made once.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart, ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import VIEWS, packet
from mxcompile.graph.tags import tensor
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.ops.view import Cast, Unpack, result_of

_Key = tuple[fx.Node, fx.Node, torch.dtype, bool]  # qdata, scale, dtype, whether scaled


class DequantizedOperands:
    """Makes the dequantized operands of one graph, each of them once."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._values: dict[_Key, fx.Node] = {}

    def value(
        self,
        qdata: fx.Node,
        scale: fx.Node,
        dim: int,
        fmt: str,
        dtype: torch.dtype,
        like: fx.Node,
        *,
        scaled: bool = True,
    ) -> fx.Node:
        """Returns the operand in `dtype` with the strides of `qdata`, from its source if the graph casts it.

        dim: dimension of the blocks, −1 or −2. fmt: name of the format. scaled: whether the scales multiply
        the elements, which are exact in `dtype`. Inserts at the insertion point.
        """
        qdata, scale, swapped = stored(qdata, scale)
        key = qdata, scale, dtype, scaled
        if key not in self._values:
            self._values[key] = self._operand(key, -3 - dim if swapped else dim, fmt, like)
        value = self._values[key]
        return transpose(value, self._build) if swapped else value

    def _operand(self, key: _Key, dim: int, fmt: str, like: fx.Node) -> fx.Node:
        qdata, scale, dtype, scaled = key
        cast = Cast.from_node(result_of(qdata)[0])
        # the scale is a result of the cast, or a view of the scales of square tiles
        is_mx = scaled and cast is not None and cast.copy.is_mx
        if cast and is_mx and (cast.copy.is_square or scale.target is operator.getitem):
            return self._cast(cast, replace(cast.copy, dtype=dtype, layout=ScaleLayout.ROW_MAJOR), like)
        if cast is not None and cast.node is result_of(scale)[0]:
            part = CopyPart.CODES if scaled else CopyPart.ELEMENTS
            values = Copy(format=cast.form, dim=cast.side, dtype=dtype, part=part)
            return self._cast(cast, values, like, scales=[scale])
        unpack = Unpack.from_node(qdata) if scaled else None
        if unpack is not None:
            qdata, dim, fmt = unpack.qdata, unpack.block_dim, unpack.fmt
        return self._build.call(ops.decode, qdata, scale if scaled else None, dim, fmt, dtype, like=like)

    def _cast(self, cast: Cast, values: Copy, like: fx.Node, **changes: Any) -> fx.Node:
        """Returns the copy `values` of the source of `cast`. changes: replaced arguments of the cast."""
        arguments = cast.arguments(copies=[str(values)], **changes)
        (result,) = self._build.results(self._build.call(ops.cast, *arguments, like=like))
        return result


def is_input(node: Any) -> bool:
    """Whether `node` is an input of the graph, or a view of an input."""
    while isinstance(node, fx.Node) and packet(node) in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


def stored(qdata: fx.Node, scale: fx.Node) -> tuple[fx.Node, fx.Node, bool]:
    """Returns (qdata, scale, whether the operand is transposed): qdata and scale without their transposes.

    Tiled scales are a vector, which has no transpose. If only the elements are transposed, and not their
    scales, both stay as they are.
    """
    base, swapped = untransposed(qdata)
    value = tensor(scale)
    if value is None or value.ndim == 1:
        return base, scale, swapped
    below, scale_swapped = untransposed(scale)
    return (base, below, swapped) if swapped == scale_swapped else (qdata, scale, False)
