"""Counting bytes: weights, and what forward keeps for backward with and without mxcompile."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from mxcompile import ops
from mxcompile.formats import BLOCK, E4M3, E5M2
from mxcompile.graph.names import module_of
from mxcompile.graph.opsets import PICKS, VIEWS, argument, packet
from mxcompile.graph.tags import Kind, numel, tag_of, tensor
from mxcompile.graph.transpose import untransposed
from mxcompile.passes.flow import origin, stored
from mxcompile.policy import Gemm


def weight_bytes(graph: fx.Graph, count: Callable[[str], int]) -> tuple[int, int]:
    """Bytes of the weights of the linear layers of `graph`, as stored and in BF16; each weight once.

    count: how many layers the module at a path stands for.
    """
    weights: dict[fx.Node, int] = {}
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or tag.kind is not Kind.LINEAR or tag.gemm is not Gemm.FPROP:
            continue
        stored = stored_weight(node, tag.tensors.index("w"))
        value = tensor(stored)
        if stored is not None and value is not None:
            weights[stored] = numel(value.shape) * count(tag.name)
    held = sum(_held(node, size) for node, size in weights.items())
    return held, 2 * sum(weights.values())


def _held(node: fx.Node, numel: int) -> int:
    """Bytes of `numel` elements of the weight `node`, with the scales of one that is stored in MXFP8."""
    value = tensor(node)
    assert value is not None
    blocks = -(-numel // BLOCK) if value.dtype in (E4M3.dtype, E5M2.dtype) else 0
    return numel * value.element_size() + blocks


def stored_weight(node: fx.Node, side: int) -> fx.Node | None:
    """The tensor a forward GEMM's weight is stored in, before casts and views."""
    if packet(node) in ops.PRODUCTS:
        qdata = untransposed(argument(node, 2 * side))[0]
        qdata = argument(qdata) if packet(qdata) in PICKS else qdata
        cast = argument(qdata) if packet(qdata) is operator.getitem else qdata
        return stored(argument(cast)) if packet(cast) in ops.CASTS else stored(cast)
    matrices = [
        arg for arg in node.args if isinstance(arg, fx.Node) and (v := tensor(arg)) is not None and v.ndim > 1
    ]
    return stored(matrices[-2:][side]) if len(matrices) > side else None


def saved_bytes(forward: fx.Graph, num_outputs: int, count: Callable[[str], int]) -> tuple[int, int]:
    """Bytes that `forward`, a partitioned forward graph, keeps for backward, and those without mxcompile.

    Without it every FP8 copy is a copy of its source in the model's dtype.

    num_outputs: the model's own outputs, which come first. Inputs that are kept cost nothing. count: how many
    layers the module at a path stands for.
    """
    (outputs,) = forward.find_nodes(op="output")
    kept = [n for n in outputs.args[0][num_outputs:] if isinstance(n, fx.Node)]
    kept = [n for n in kept if _viewed(n).op != "placeholder" and tensor(n) is not None]
    times = {node: count(module_of(node)[0]) for node in kept}
    total = sum(_bytes(node) * times[node] for node in kept)
    quantized = [n for n in kept if _cast_of(n) is not None]
    sources = {origin(n) for n in kept if n not in quantized}
    replaced = 0
    for node in quantized:
        cast = _cast_of(node)
        assert cast is not None
        source = origin(argument(cast))
        if source not in sources and source.op != "placeholder":
            sources.add(source)
            itemsize = cast.meta.get("mx_itemsize", 2)
            replaced += numel(node.meta["val"].shape) * itemsize * times[node]
    return total, total - sum(_bytes(node) * times[node] for node in quantized) + replaced


def _viewed(node: fx.Node) -> fx.Node:
    """The tensor that `node` is a view of."""
    while packet(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _cast_of(node: fx.Node) -> fx.Node | None:
    """The cast that made `node`, elements or scales, seen through a transpose."""
    node = untransposed(node)[0]
    if packet(node) is not operator.getitem:
        return None
    cast = argument(node)
    return cast if packet(cast) in ops.CASTS else None


def _bytes(node: fx.Node) -> int:
    value = tensor(node)
    assert value is not None
    return numel(value.shape) * value.element_size()
