"""expand: make the mx GEMMs of a graph what a target without a native MX GEMM runs.

    scaled_mm(qa, sa, qb, sb) → mm(dequantize(qa, sa), dequantize(qb, sb))

The dequantized operands are exact in BF16, extreme scales aside (see docs/numerics.md), so the vendor's BF16
GEMM gives what an MX GEMM would, up to the order of accumulation. Where the cast is made in the same graph it
never becomes FP8: quantize and dequantize are one operator that fuses with what comes before. FP8 copies that
cross from forward to backward stay FP8.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import set_tag, tags_of, tensor
from mxcompile.graph.transpose import transpose, untransposed


@dataclass(frozen=True, kw_only=True, slots=True)
class Expand:
    """No options."""

    name: ClassVar[str] = "expand"

    def apply(self, graph: fx.Graph) -> None:
        """Replace the mx GEMMs of `graph` without a kernel by aten GEMMs, and name those in their tags."""
        expander = _Expander(graph)
        for node in list(graph.nodes):
            if packet(node) in ops.PRODUCTS and not any(tag.kernel for tag in tags_of(node)):
                expander.expand(node)
        graph.eliminate_dead_code()


class _Expander:
    """State of one run: the operands dequantized so far."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._build = Builder(graph, Expand.name)
        self._values: dict[tuple[fx.Node, fx.Node, torch.dtype], fx.Node] = {}

    def expand(self, node: fx.Node) -> None:
        """Replace `node`, a product of mx operands."""
        out = tensor(node)
        assert out is not None
        dtype = torch.bfloat16 if out.dtype is torch.bfloat16 else torch.float32
        qa, sa, qb, sb = (argument(node, index) for index in range(4))
        extra: Any = node.args[4]
        with self._graph.inserting_before(node):
            a = self._value(qa, sa, -1, dtype, node)
            b = self._value(qb, sb, -2, dtype, node)
            if packet(node) is ops.scaled_grouped_mm.overloadpacket:
                result = self._build.call(aten._grouped_mm.default, a, b, extra, like=node)
            else:
                result = self._product(a, b, extra, dtype, node)
            kernel = f"{packet(result)} ({_word(dtype)}, dequantized)"
            set_tag(result, *(replace(tag, kernel=kernel) for tag in tags_of(node)))
            result = self._cast(result, out.dtype, node)
        self._build.replace(node, result)

    def _product(
        self, a: fx.Node, b: fx.Node, bias: fx.Node | None, dtype: torch.dtype, node: fx.Node
    ) -> fx.Node:
        value = tensor(a)
        assert value is not None
        batched = value.ndim > 2
        if bias is None:
            return self._build.call(aten.bmm.default if batched else aten.mm.default, a, b, like=node)
        target = aten.baddbmm.default if batched else aten.addmm.default
        return self._build.call(target, self._cast(bias, dtype, node), a, b, like=node)

    def _cast(self, node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        value = tensor(node)
        if value is not None and value.dtype is dtype:
            return node
        convert = torch.ops.prims.convert_element_type.default
        return self._build.call(convert, node, dtype, like=like)

    def _value(self, qdata: Any, scale: Any, dim: int, dtype: torch.dtype, node: fx.Node) -> fx.Node:
        """The operand in `dtype`, from its source if that is at hand, with the strides of `qdata`."""
        qdata, swapped = untransposed(qdata)
        scale, scale_swapped = untransposed(scale)
        assert swapped == scale_swapped, "elements and scales of an operand are transposed alike"
        dim = -3 - dim if swapped else dim
        key = qdata, scale, dtype
        if key not in self._values:
            self._values[key] = self._emit(qdata, scale, dim, dtype, node)
        value = self._values[key]
        return transpose(value, self._build) if swapped else value

    def _emit(self, qdata: fx.Node, scale: fx.Node, dim: int, dtype: torch.dtype, node: fx.Node) -> fx.Node:
        made = qdata.args[0] if qdata.target is operator.getitem else None
        if isinstance(made, fx.Node) and made.target is ops.quantize:
            square = len(made.args) > 4 and made.args[4]
            if square or scale.target is operator.getitem:
                arguments = (*made.args[:4], square)
                return self._build.call(ops.quantize_dequantize, *arguments, dtype, like=node)
        return self._build.call(ops.dequantize, qdata, scale, dim, dtype, like=node)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
