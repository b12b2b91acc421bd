"""Counting: bytes of weights, of what forward keeps for backward, of what ranks send; casts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.formats import BLOCK, E4M3, E5M2
from mxcompile.graph.casts import made_by
from mxcompile.graph.opsets import COLLECTIVES, argument, packet
from mxcompile.graph.tags import PASS_KEY, GemmTag, Kind, bytes_of, numel, tag_of, tensor, value_of
from mxcompile.graph.transpose import untransposed
from mxcompile.models.names import module_of
from mxcompile.ops.view import Product, results_of
from mxcompile.passes.flow import gemms_reading, origin, stored, viewed
from mxcompile.passes.gather import Gather
from mxcompile.policy import Gemm


def weight_bytes(graph: fx.Graph, count: Callable[[str], int]) -> tuple[tuple[str, int, int], ...]:
    """The weights of the linear layers of `graph`, each once: of which layer, bytes as stored, and in BF16.

    count: how many layers the module at a path stands for.
    """
    weights: dict[fx.Node, tuple[GemmTag, int]] = {}
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or tag.kind is not Kind.LINEAR or tag.gemm is not Gemm.FPROP:
            continue
        stored = stored_weight(node, tag.tensors.index("w"))
        value = tensor(stored)
        if stored is not None and value is not None:
            weights.setdefault(stored, (tag, _per_byte(tag) * numel(value.shape) * count(tag.name)))
    return tuple((tag.name, _held(node, tag, size), 2 * size) for node, (tag, size) in weights.items())


def _held(node: fx.Node, tag: GemmTag, numel: int) -> int:
    """Bytes of `numel` elements of the weight `node`, with the scales of one that is stored quantized."""
    value = value_of(node)
    scaled = tag.stored is not None or value.dtype in (E4M3.dtype, E5M2.dtype)
    blocks = -(-numel // (BLOCK if tag.stored is None else tag.stored.tile.along)) if scaled else 0
    return numel // _per_byte(tag) * value.element_size() + blocks


def _per_byte(tag: GemmTag) -> int:
    """How many elements of the weight of `tag` each element of the graph's input holds."""
    return 1 if tag.stored is None else tag.stored.elem.per_byte


def stored_weight(node: fx.Node, side: int) -> fx.Node | None:
    """The tensor a forward GEMM's weight is stored in, before casts and views."""
    if packet(node) in ops.PRODUCTS:
        maker, _ = made_by(Product.read(node).sides[side][0])
        return stored(argument(maker) if packet(maker) in ops.CASTS else maker)
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
    kept = [n for n in kept if viewed(n).op != "placeholder" and tensor(n) is not None]
    times = {node: count(module_of(node)[0]) for node in kept}
    total = sum(_bytes(node) * times[node] for node in kept)
    quantized = [n for n in kept if _cast_of(n) is not None]
    sources = {origin(n) for n in kept if n not in quantized}
    replaced = 0
    for node in quantized:
        cast = _cast_of(node)
        assert cast is not None
        source = _source(cast)
        if source not in sources and source.op != "placeholder":
            sources.add(source)
            itemsize = cast.meta.get("mx_itemsize", 2)
            replaced += numel(node.meta["val"].shape) * itemsize * times[node]
    return total, total - sum(_bytes(node) * times[node] for node in quantized) + replaced


def _source(cast: fx.Node) -> fx.Node:
    """The tensor that `cast` casts, before views and a transform."""
    source = origin(argument(cast))
    return origin(argument(source)) if source.target is ops.hadamard else source


def _cast_of(node: fx.Node) -> fx.Node | None:
    """The cast that made `node`, elements or scales, seen through a transpose."""
    node = untransposed(node)[0]
    if packet(node) is not operator.getitem:
        return None
    cast = argument(node)
    return cast if packet(cast) in ops.CASTS else None


def _bytes(node: fx.Node) -> int:
    return bytes_of(value_of(node))


def num_casts(graph: fx.Graph, count: Callable[[str], int]) -> int:
    """Copies of elements that `graph` makes each time it runs, in whatever layout.

    count: how many layers the module at a path stands for.
    """
    total = 0
    for node in graph.nodes:
        if _is_read(node):
            layers = [tag.name for tag in gemms_reading(node)] or [module_of(node)[0]]
            total += max(map(count, layers))
    return total


def _is_read(node: fx.Node) -> bool:
    """Whether `node` is a cast whose elements are read, and not its scales alone."""
    return node.target is ops.cast and any(place == 0 and result.users for place, result in results_of(node))


def wire_bytes(graph: fx.Graph, count: Callable[[str], int]) -> tuple[int, int]:
    """Bytes that this rank gives to the collectives of `graph`, and those without mxcompile.

    count: how many layers the module at a path stands for.
    """
    total = without = 0
    for node, given, before in sent(graph):
        times = count(module_of(node)[0])
        total += given * times
        without += before * times
    return total, without


def sent(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    """The collectives of `graph`, each with the bytes that this rank gives, and those without mxcompile."""
    for node in graph.nodes:
        if packet(node) not in COLLECTIVES:
            continue
        tensors = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        given = sum(_bytes(each) for each in tensors if tensor(each) is not None)
        moved = node.meta.get(PASS_KEY) == Gather.name
        yield node, given, _bytes(_packed(node)) if moved else given


def _packed(gather: fx.Node) -> fx.Node:
    """The tensor whose codes and scales the collective `gather` was given, as it was given to it before."""
    parts: Any = argument(gather).args[0]
    source = argument(argument(argument(parts[0])))  # the bytes of an item of the cast
    while source.meta.get(PASS_KEY) == Gather.name:  # converted before the cast, and not behind the gather
        source = argument(source)
    return source
