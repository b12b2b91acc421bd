"""few_rows: products of few rows of BF16 read an unquantized weight as it lies in memory, on CPUs.

    mm(x, wᵀ) → weight_only_mm(x, w)

These are products of layers that the policy keeps in BF16, such as the head. The vendor's GEMM takes 1.4
times as long or more. On a CPU without BF16 instructions the weight would be converted to FP32 in every call
(`promote`). If the number of rows is symbolic, the vendor's GEMM stays, because the number may be large in a
later call. Graphs without quantized tensors keep Inductor's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import is_empty, lies_in_order, set_tag, tags_of, tensor, value_of
from mxcompile.graph.transpose import untransposed
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.lowering.graph.operands import is_input


class FewRows(LoweringPass):
    """Chooses the kernel for few rows of BF16 and weights in BF16."""

    in_cpp = True

    @property
    def applies(self) -> bool:
        """Whether the kernel is faster on the CPU for any number of rows."""
        return self.target.few_rows > 0

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Yields the products that the kernel supports, if a tensor of `graph` is quantized."""
        if any(packet(node) in ops.CASTS | ops.PRODUCTS for node in graph.nodes):
            for node in list(graph.nodes):
                if packet(node) in (aten.mm, aten.addmm) and self._takes(node):
                    yield node

    def apply(self, graph: fx.Graph) -> None:
        """Replaces the candidates of `graph`, and names the kernel in their tags."""
        build = Builder(graph, self.name)
        for node in self.candidates(graph):
            x, weight = operands(node)
            bias = node.args[0] if packet(node) is aten.addmm else None
            arguments = (x, untransposed(weight)[0], None, bias, torch.bfloat16, "")
            with graph.inserting_before(node):
                result = build.call(ops.weight_only_mm, *arguments, like=node)
            name = "mx_weight_only_mm C++ (bfloat16)"
            set_tag(result, *(replace(tag, kernel=tag.with_fallbacks(name)) for tag in tags_of(node)))
            build.replace(node, result)

    def _takes(self, node: fx.Node) -> bool:
        values = [tensor(part) for part in (node, *node.all_input_nodes)]
        if any(value is None or value.dtype is not torch.bfloat16 for value in values):
            return False
        weight, is_transposed = untransposed(operands(node)[1])
        matrix, rows = value_of(weight), value_of(node).shape[0]
        if not isinstance(rows, int) or rows > self.target.few_rows or is_empty((rows, *matrix.shape)):
            return False
        if matrix.device.type != self.device or not is_transposed or node.kwargs or not tags_of(node):
            return False
        return is_input(weight) and lies_in_order(matrix)
