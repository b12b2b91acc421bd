"""restore: give matmuls that stay in BF16 the form that Inductor would give them.

Gradients that `split` separated become one node again, and degenerate matmuls are decomposed. Inductor turns
products with a contraction of length one into multiplications, and matrix-vector products into sums, before
any pass runs. `compiler.session.decompositions` disables that, so that `find` and `decide` see them. This
pass traces Inductor's decomposition for the products that stay as they are, so that their results are
bit-identical to results without mxcompile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import MATMULS, argument, aten, gradient_index, packet
from mxcompile.graph.tags import set_tag, tagged, tags_of, value_of
from mxcompile.passes.split import HALF, masked

_Rules = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Gives matmuls that stay in BF16 the form that Inductor would give them."""

    name: ClassVar[str] = "restore"

    def apply(self, graph: fx.Graph) -> None:
        """Joins split gradients and decomposes degenerate matmuls of `graph`; tags move to the results."""
        build, rules = Builder(graph, self.name), select_decomp_table()
        _join(graph, build)
        for node, tag in tagged(graph):
            if tag.formats is not None or packet(node) not in MATMULS:
                continue
            if (traced := _traced(node, rules)) is not None:
                result, kernel = _inlined(traced, node, build)
                set_tag(result, replace(tag, kernel=kernel))
                build.replace(node, result)


def _join(graph: fx.Graph, build: Builder) -> None:
    """Joins the gradients of one operator that stay as they are (see `split`)."""
    halves: dict[tuple[str, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if HALF in node.meta:
            halves.setdefault(node.meta[HALF], []).append(node)
    for (_, num_parts), nodes in halves.items():
        indices = tuple(gradient_index(node) for node in nodes)
        first = nodes[0]
        if indices == (2,) and num_parts > 1:  # only the gradient of a convolution's bias is left: a sum
            dy = argument(first)
            dims = [dim for dim in range(value_of(dy).ndim) if dim != 1]
            with graph.inserting_before(first):
                total = build.call(aten.sum.dim_IntList, dy, dims, like=first)
            build.replace(next(iter(first.users)), total)
            graph.erase_node(first)
            continue
        first.args = masked(first, indices)
        del first.meta[HALF]
        set_tag(first, *(tag for node in nodes for tag in tags_of(node)))
        for other in nodes[1:]:
            other.replace_all_uses_with(first)
            graph.erase_node(other)


def _traced(node: fx.Node, rules: _Rules) -> fx.Graph | None:
    """Returns Inductor's decomposition of `node` as a graph, None if Inductor keeps the operator."""
    if (rule := rules.get(node.target)) is None:
        return None

    def called(function: Callable[..., Any], *values: Tensor) -> Any:
        inputs = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        return function(*args, **kwargs)

    values = [operand.meta["val"] for operand in node.all_input_nodes]
    with torch.no_grad(), torch._C._DisableAutocast():  # the dtypes of the graph are final
        if called(rule, *values) is NotImplemented:
            return None
        target: Any = node.target
        graph = make_fx(lambda *args: called(target, *args), decomposition_table=dict(rules))(*values).graph
    calls = graph.find_nodes(op="call_function", target=node.target)
    return None if calls else graph


def _inlined(traced: fx.Graph, node: fx.Node, build: Builder) -> tuple[fx.Node, str]:
    """Copies `traced` in front of `node`. Returns its result and the name of the multiplying operator."""
    new = dict(zip(traced.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with build.graph.inserting_before(node):
        for inner in [call for call in traced.nodes if call.op == "call_function"]:
            args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), new.__getitem__)
            new[inner] = build.call(inner.target, *args, like=node, **kwargs)
    (result,) = traced.output_node().args
    packets = {packet(inner) for inner in new.values()}
    kernel = next((op for op in (aten.sum, aten.mul) if op in packets), packet(new[result]))
    return new[result], str(kernel)
