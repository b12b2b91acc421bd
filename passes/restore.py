"""restore: give back to Inductor, as it would have them, the matmuls that stay in BF16.

Gradients that `split` has taken apart become one node again. Degenerate matmuls are decomposed again:

Inductor turns products with a contraction of length one into a multiplication, and matrix-vector products
into a sum, before any pass runs; `decompositions` keeps them whole so that they are found and decided.
Those that stay as they are get Inductor's form back, and its exactness: a rotary embedding's positions ×
frequencies must not meet a GEMM that rounds its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten, gradient_index, packet
from mxcompile.graph.shapes import matmul_sizes, operands
from mxcompile.graph.tags import set_tag, tag_of, tags_of, tensor, value_of
from mxcompile.passes.split import HALF, masked


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """No options."""

    name: ClassVar[str] = "restore"

    def apply(self, graph: fx.Graph) -> None:
        """Decompose the degenerate matmuls of `graph`; their tags stay on the result."""
        build = Builder(graph, self.name)
        _join(graph, build)
        for node in list(graph.nodes):
            tag = tag_of(node)
            if tag is None or tag.formats is not None:
                continue
            with graph.inserting_before(node):
                result = _decomposed(node, build)
            if result is not None:
                set_tag(result, replace(tag, kernel=str(packet(result))))
                build.replace(node, result)


def _join(graph: fx.Graph, build: Builder) -> None:
    """Make one node of the gradients of one operator that stay (see `split`); all others are GEMMs by now."""
    halves: dict[tuple[str, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if HALF in node.meta:
            halves.setdefault(node.meta[HALF], []).append(node)
    for (_, num_parts), nodes in halves.items():
        indices = tuple(gradient_index(node) for node in nodes)
        if indices == (2,) and num_parts > 1:
            _sum_bias(nodes[0], build)
            continue
        first = nodes[0]
        first.args = masked(first, indices)
        del first.meta[HALF]
        set_tag(first, *(tag for node in nodes for tag in tags_of(node)))
        for other in nodes[1:]:
            other.replace_all_uses_with(first)
            graph.erase_node(other)


def _sum_bias(node: fx.Node, build: Builder) -> None:
    """The gradient of a convolution's bias, where nothing else is left of its gradients."""
    dy = argument(node)
    dims = [dim for dim in range(dy.meta["val"].ndim) if dim != 1]
    with build.graph.inserting_before(node):
        total = build.call(aten.sum.dim_IntList, dy, dims, like=node)
    build.replace(next(iter(node.users)), total)
    build.graph.erase_node(node)


def _decomposed(node: fx.Node, build: Builder) -> fx.Node | None:
    what = packet(node)
    if what in (aten.mm, aten.bmm):
        k = matmul_sizes(node)[3]
        if isinstance(k, int) and k == 1 and _same_dtype(node):
            return build.call(aten.mul.Tensor, *operands(node), like=node)
    if what is aten.mv and _same_dtype(node):
        value = value_of(node)
        matrix, vector = (build.converted(operand, torch.float32, operand) for operand in operands(node))
        product = build.call(aten.mul.Tensor, matrix, vector, like=node)
        total = build.call(aten.sum.dim_IntList, product, [1], like=node)
        return build.converted(total, value.dtype, total)
    return None


def _same_dtype(node: fx.Node) -> bool:
    dtypes = {value.dtype for n in (node, *operands(node)) if (value := tensor(n)) is not None}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
