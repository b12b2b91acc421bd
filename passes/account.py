"""Counts bytes of tensors that forward saves and of tensors that ranks send, and casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import COLLECTIVES, argument, packet
from mxcompile.graph.reshapes import producing_call
from mxcompile.graph.tags import PASS_KEY, bytes_of, numel, tensor
from mxcompile.graph.transpose import untransposed
from mxcompile.models.names import module_of
from mxcompile.ops.view import Product, result_of, results_of
from mxcompile.passes.gather import Gather
from mxcompile.passes.roles.flow import gemms_reading, origin, stored, viewed


def stored_weight(node: fx.Node, side: int) -> fx.Node | None:
    """Returns the tensor behind casts and views that stores the weight, operand `side` of a forward GEMM."""
    if packet(node) in ops.PRODUCTS:
        maker, _ = producing_call(Product.read(node).sides[side][0])
        return stored(argument(maker) if packet(maker) in ops.CASTS else maker)
    nodes = [arg for arg in node.args if isinstance(arg, fx.Node)]
    matrices = [arg for arg in nodes if (value := tensor(arg)) is not None and value.ndim > 1]
    return stored(matrices[-2:][side]) if len(matrices) > side else None


def saved_bytes(forward: fx.Graph, num_outputs: int, count: Callable[[str], int]) -> tuple[int, int]:
    """Returns the bytes that the partitioned graph `forward` saves for backward, with and without mxcompile.

    Without mxcompile a source in the model's dtype stands for its FP8 copies. Saved inputs of the graph count
    as 0 bytes.

    num_outputs: number of the model's own outputs, which come first. count: number of layers that the module
    at a path stands for.
    """
    (outputs,) = forward.find_nodes(op="output")
    kept = [n for n in outputs.args[0][num_outputs:] if isinstance(n, fx.Node)]
    kept = [n for n in kept if viewed(n).op != "placeholder" and tensor(n) is not None]
    times = {node: count(module_of(node)[0]) for node in kept}
    total = sum(bytes_of(tensor(node)) * times[node] for node in kept)
    # elements or scales, also transposed
    makers = {node: result_of(untransposed(node)[0])[0] for node in kept}
    casts = {node: cast for node, cast in makers.items() if cast is not None and packet(cast) in ops.CASTS}
    sources = {origin(n) for n in kept if n not in casts}
    replaced = 0
    for node, cast in casts.items():
        source = origin(argument(cast))
        if source.target is ops.hadamard:
            source = origin(argument(source))
        if source not in sources and source.op != "placeholder":
            sources.add(source)
            itemsize = cast.meta.get("mx_itemsize", 2)
            replaced += numel(node.meta["val"].shape) * itemsize * times[node]
    return total, total - sum(bytes_of(tensor(node)) * times[node] for node in casts) + replaced


def num_casts(graph: fx.Graph, count: Callable[[str], int]) -> int:
    """Returns the number of casts in a run of `graph`. count: see `saved_bytes`."""
    total = 0
    for node in graph.find_nodes(op="call_function", target=ops.cast):
        if any(index == 0 and result.users for index, result in results_of(node)):  # not only its scales
            layers = [tag.name for tag in gemms_reading(node)] or [module_of(node)[0]]
            total += max(map(count, layers))
    return total


def wire_bytes(graph: fx.Graph, count: Callable[[str], int]) -> tuple[int, int]:
    """Returns the bytes that this rank sends by the collectives of `graph`, with and without mxcompile.

    count: see `saved_bytes`.
    """
    rows = [(count(module_of(node)[0]), *num_bytes) for node, *num_bytes in sent(graph)]
    return sum(times * now for times, now, _ in rows), sum(times * before for times, _, before in rows)


def sent(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, int]]:
    """Yields (collective, bytes that this rank sends, the same without mxcompile) for `graph`."""
    for node in graph.nodes:
        if packet(node) not in COLLECTIVES:
            continue
        tensors = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        num_bytes = sum(bytes_of(tensor(value)) for value in tensors)
        moved = node.meta.get(PASS_KEY) == Gather.name
        yield node, num_bytes, bytes_of(tensor(_packed(node))) if moved else num_bytes


def _packed(gather: fx.Node) -> fx.Node:
    """Returns the tensor that the collective `gather` would send unquantized."""
    parts: Any = argument(gather).args[0]
    source = argument(argument(argument(parts[0])))  # through the byte view and getitem to the cast's input
    while source.meta.get(PASS_KEY) == Gather.name:  # a conversion that `gather` moved before the cast
        source = argument(source)
    return source
