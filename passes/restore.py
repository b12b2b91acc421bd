"""restore: give back to Inductor, as it would have them, the matmuls that stay in BF16.

Gradients that `split` has taken apart become one node again. Degenerate matmuls are decomposed again:

Inductor turns products with a contraction of length one into a multiplication, and matrix-vector products
into a sum, before any pass runs; `decompositions` keeps them whole so that they are found and decided. The
products that stay as they are get Inductor's own decomposition back, traced for their operands, so that they
have every bit of what they are without this project.
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
from mxcompile.graph.tags import set_tag, tag_of, tags_of
from mxcompile.passes.split import HALF, masked

_Rules = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """No options."""

    name: ClassVar[str] = "restore"

    def apply(self, graph: fx.Graph) -> None:
        """Decompose the degenerate matmuls of `graph`; their tags stay on the result."""
        build, rules = Builder(graph, self.name), select_decomp_table()
        _join(graph, build)
        for node in list(graph.nodes):
            tag = tag_of(node)
            if tag is None or tag.formats is not None or packet(node) not in MATMULS:
                continue
            traced = _traced(node, rules)
            if traced is not None:
                result, kernel = _inlined(traced, node, build)
                set_tag(result, replace(tag, kernel=kernel))
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


def _traced(node: fx.Node, rules: _Rules) -> fx.Graph | None:
    """Returns the graph that Inductor makes of the operator of `node`, None for the operator itself."""
    rule = rules.get(node.target)
    if rule is None:
        return None

    def called(function: Callable[..., Any], *values: Tensor) -> Any:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        return function(*args, **kwargs)

    values = [operand.meta["val"] for operand in node.all_input_nodes]
    with torch.no_grad(), torch._C._DisableAutocast():
        if called(rule, *values) is NotImplemented:
            return None
        target: Any = node.target
        graph = make_fx(lambda *given: called(target, *given), decomposition_table=dict(rules))(*values).graph
    calls = graph.find_nodes(op="call_function", target=node.target)
    return None if calls else graph


def _inlined(traced: fx.Graph, node: fx.Node, build: Builder) -> tuple[fx.Node, str]:
    """Put the nodes of `traced` in front of `node`. Returns the result, and the operator that multiplies."""
    new = dict(zip(traced.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    with build.graph.inserting_before(node):
        for inner in [each for each in traced.nodes if each.op == "call_function"]:
            args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), new.__getitem__)
            new[inner] = build.call(inner.target, *args, like=node, **kwargs)
    (result,) = traced.output_node().args
    packets = {packet(inner) for inner in new.values()}
    kernel = next((what for what in (aten.sum, aten.mul) if what in packets), packet(new[result]))
    return new[result], str(kernel)
