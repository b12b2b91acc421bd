"""integer: multiply MXINT8 matrices of many rows in integers, on CPUs where this is fastest.

`cpu.integer_mm` lowers these products, which stay in the graph. The kernel packs operands while it runs,
so that memory holds no second copy of a stored weight. `weight_only` and `expand` take products of few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from mxcompile import ops
from mxcompile.graph.tags import hint, is_empty, lies_in_order, set_tag, tags_of, tensor, value_of
from mxcompile.lowering.choices.families import TABLE, Family
from mxcompile.lowering.cpu import MOST_ROWS
from mxcompile.lowering.cpu.integer_mm import KERNEL
from mxcompile.lowering.cpu.kernel import C_TYPES
from mxcompile.lowering.graph.expand import working_dtype
from mxcompile.lowering.graph.lowering_pass import LoweringPass, Reasons
from mxcompile.ops.view import Product


class Integer(LoweringPass):
    """Chooses the products that run in integers."""

    family = Family.INTEGER
    in_cpp = True

    def candidates(self, graph: fx.Graph) -> Iterator[fx.Node]:
        """Returns the products of `graph` that the kernel supports."""
        return (node for node in graph.nodes if node.target is ops.matmul and self._takes(node))

    def apply(self, graph: fx.Graph) -> Reasons:
        """Names the kernel in the tags of the candidates, unless another kernel is faster on this CPU."""
        reasons: dict[fx.Node, str] = {}
        for node in self.candidates(graph):
            reason = self.target.no_integers.get(working_dtype(value_of(node).dtype, self.target), "")
            if reason or not self.target.integers:
                reasons[node] = reason or f"target {self.target.name} has no products in integers"
                continue
            kernel_name = f"{KERNEL} ({self.target.integers})"
            set_tag(node, *(replace(tag, kernel=kernel_name) for tag in tags_of(node)))
        return reasons

    def _takes(self, node: fx.Node) -> bool:
        product = Product.read(node)
        if product.tensors or not TABLE[self.family].takes(product.forms):
            return False
        out, a, b = map(tensor, (node, product.a, product.b))
        if out is None or a is None or b is None or out.ndim != 2 or out.device.type != self.device:
            return False
        bias = tensor(product.bias)
        if not {out.dtype, out.dtype if bias is None else bias.dtype} <= C_TYPES.keys():
            return False
        if is_empty((*out.shape, a.shape[1])) or hint(out.shape[0]) <= MOST_ROWS:
            return False
        return all(lies_in_order(side) or lies_in_order(side.t()) for side in (a, b))
