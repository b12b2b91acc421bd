"""expand: make the mx GEMMs of a graph what a target without a native MX GEMM runs.

    scaled_mm(qa, sa, qb, sb) → mm(dequantize(qa, sa), dequantize(qb, sb))

The dequantized operands are exact in BF16, extreme scales aside (see docs/numerics.md), so the vendor's BF16
GEMM gives what an MX GEMM would, up to the order of accumulation. FP8 copies that cross from forward to
backward stay FP8 (see `operands`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import set_tag, tags_of, tensor
from mxcompile.lowering.graph.operands import Operands


@dataclass(frozen=True, kw_only=True, slots=True)
class Expand:
    """reasons: why a product is not on a kernel it is for, by its node; the record then says so."""

    reasons: Mapping[fx.Node, str] = field(default_factory=dict)
    name: ClassVar[str] = "expand"

    def apply(self, graph: fx.Graph) -> None:
        """Replace the mx GEMMs of `graph` without a kernel by aten GEMMs, and name those in their tags."""
        expander = _Expander(graph, self.reasons)
        for node in list(graph.nodes):
            if packet(node) in ops.PRODUCTS and not any(tag.kernel for tag in tags_of(node)):
                expander.expand(node)
        graph.eliminate_dead_code()


def working_dtype(out: torch.dtype) -> torch.dtype:
    """What the operands of a product are dequantized to, by the dtype of its result."""
    return torch.bfloat16 if out is torch.bfloat16 else torch.float32


class _Expander:
    """State of one run."""

    def __init__(self, graph: fx.Graph, reasons: Mapping[fx.Node, str]) -> None:
        self._graph = graph
        self._reasons = reasons
        self._build = Builder(graph, Expand.name)
        self._operands = Operands(self._build)

    def expand(self, node: fx.Node) -> None:
        """Replace `node`, a product of mx operands."""
        out = tensor(node)
        assert out is not None
        dtype = working_dtype(out.dtype)
        qa, sa, qb, sb = (argument(node, index) for index in range(4))
        extra: Any = node.args[4]
        with self._graph.inserting_before(node):
            a = self._operands.value(qa, sa, -1, dtype, node)
            b = self._operands.value(qb, sb, -2, dtype, node)
            if packet(node) is ops.scaled_grouped_mm.overloadpacket:
                vendors = aten._grouped_mm.default if dtype is torch.bfloat16 else ops.grouped_mm
                result = self._build.call(vendors, a, b, extra, like=node)
            else:
                result = self._product(a, b, extra, dtype, node)
            kernel = f"{packet(result)} ({_word(dtype)}, dequantized)"
            kernel = "; ".join(filter(None, (kernel, self._reasons.get(node))))
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


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
