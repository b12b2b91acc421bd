"""Liveness analysis: the bytes that the graphs of a rank hold in memory, node by node.

    saved      tensors that forward keeps for backward
    working    all other tensors with a later reader: results, gradients of activations, recomputed values

Values that stay inside one fused kernel never reach memory (`offline.graph_work.unwritten`) and do not
count. A view counts as its base tensor. Parameters and other graph inputs are counted by `memory`. A traced
layer can represent c equal layers, which then run c times. Backward is therefore evaluated twice per node: in
the first of the equal layers, when none of their saved tensors is freed, and in the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import bytes_of
from mxcompile.models.names import GraphInput, module_of
from mxcompile.offline.graph_work import base, unwritten
from mxcompile.passes.roles.flow import input_of, plain_descriptor
from mxcompile.plan.repeats import Repeats

_WAIT = torch.ops._c10d_functional.wait_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessPoint:
    """The memory while a node runs.

    path: module path of the node. saved, last: saved bytes during the first and the last of the equal layers
    that the module represents. working: working bytes. times: number of equal layers. layer: path of the
    representing layer, "" outside of folded layers. gradients: (parameter path, bytes) of each gradient that
    this node completes.
    """

    path: str
    saved: int
    last: int
    working: int
    times: int = 1
    layer: str = ""
    gradients: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLiveness:
    """The liveness of a graph's forward and backward nodes, in execution order.

    saved: bytes kept between forward and backward, for all layers. results: bytes of the other forward
    outputs. kept: (module path, saved bytes) of each saved tensor, for one of the equal layers.
    """

    forward: tuple[LivenessPoint, ...]
    backward: tuple[LivenessPoint, ...] = ()
    saved: int = 0
    results: int = 0
    kept: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _Buffer:
    """A tensor in memory, in `times` equal layers that `keeper` represents.

    birth, death: positions of the node that writes it and of its last reader.
    """

    size: int
    birth: int
    death: int
    times: int = 1
    keeper: str = ""


@dataclass(slots=True)
class _Sum:
    """Bytes in memory. all: in all equal layers. others: in all but one of them, by representing layer."""

    all: int = 0
    others: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, buffer: _Buffer, sign: int = 1) -> None:
        self.all += sign * buffer.size * buffer.times
        self.others[buffer.keeper] += sign * buffer.size * (buffer.times - 1)


def live(
    forward: fx.Graph, backward: fx.Graph | None, inputs: tuple[GraphInput, ...], repeats: Repeats
) -> GraphLiveness:
    """Returns the liveness of a partitioned `forward` and `backward`; `backward` is None for inference.

    inputs: inputs of the captured graph. repeats: which layers represent which equal layers.
    """
    read = set() if backward is None else {node.name for node in backward.find_nodes(op="placeholder")}
    buffers = _buffers(forward)
    saved = {node: buffer for node, buffer in buffers.items() if _saved_as(node, read)}
    for node, buffer in saved.items():
        path = module_of(node)[0]
        buffer.times, buffer.keeper = repeats.count(path), repeats.keeper(path) or ""
    moments = tuple(_of_forward(forward, buffers, saved, repeats))
    if backward is None:
        return GraphLiveness(forward=moments)
    kept = {_saved_as(node, read): buffer for node, buffer in saved.items()}
    (outputs,) = forward.find_nodes(op="output")
    returned = {_storage(node) for node in outputs.all_input_nodes} - saved.keys()
    return GraphLiveness(
        forward=moments,
        backward=tuple(_of_backward(backward, kept, inputs, repeats)),
        saved=sum(buffer.size * buffer.times for buffer in saved.values()),
        kept=tuple((module_of(node)[0], buffer.size) for node, buffer in saved.items()),
        results=sum(buffers[node].size for node in returned if node in buffers),
    )


def _of_forward(
    graph: fx.Graph, buffers: dict[fx.Node, _Buffer], saved: dict[fx.Node, _Buffer], repeats: Repeats
) -> Iterator[LivenessPoint]:
    """Yields forward snapshots. For folded layers, the snapshot of the last layer."""
    before, after = _Sum(), _Sum()
    for buffer in saved.values():
        after.add(buffer)
    working = _changes(buffer for node, buffer in buffers.items() if node not in saved)
    working_bytes = 0
    for index, node in enumerate(graph.nodes):
        working_bytes += working.get(index, 0)
        saved_buffer = saved.get(node)
        if saved_buffer is not None:
            before.add(saved_buffer)
            after.add(saved_buffer, -1)
        path = module_of(node)[0]
        now = before.all + after.others[repeats.keeper(path) or ""]
        yield LivenessPoint(path=path, saved=now, last=now, working=working_bytes)


def _of_backward(
    graph: fx.Graph, kept: dict[str, _Buffer], inputs: tuple[GraphInput, ...], repeats: Repeats
) -> Iterator[LivenessPoint]:
    buffers = _buffers(graph, placeholders=True)
    gradients = _gradients(graph, inputs)
    alive, dead = _Sum(), _Sum()
    ends: defaultdict[int, list[_Buffer]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        buffer, received = kept.get(node.name), buffers.pop(node, None)
        if buffer is not None and received is not None:
            alive.add(buffer)
            ends[received.death].append(buffer)
        elif received is not None and "tangents" in node.name:
            buffers[node] = received
    working = _changes(buffer for node, buffer in buffers.items() if node not in gradients)
    held_bytes = 0
    for index, node in enumerate(graph.nodes):
        held_bytes += working.get(index, 0)
        path = module_of(node)[0]
        layer = repeats.keeper(path) or ""
        first, last = alive.all + dead.others[layer], alive.all - alive.others[layer]
        yield LivenessPoint(
            path=path,
            saved=first,
            last=last,
            working=held_bytes,
            times=repeats.count(path),
            layer=layer,
            gradients=tuple(gradients.get(node, ())),
        )
        for buffer in ends.get(index, ()):
            alive.add(buffer, -1)
            dead.add(buffer)


def _gradients(graph: fx.Graph, inputs: tuple[GraphInput, ...]) -> dict[fx.Node, list[tuple[str, int]]]:
    """Returns the (parameter path, bytes) of each parameter gradient, by the node that writes it."""
    (outputs,) = graph.find_nodes(op="output")
    written: defaultdict[fx.Node, list[tuple[str, int]]] = defaultdict(list)
    for value, about in zip(outputs.args[0], outputs.meta.get("desc") or (), strict=False):
        graph_input = input_of(getattr(plain_descriptor(about), "grad_of", None), inputs)
        if isinstance(value, fx.Node) and graph_input is not None and graph_input.static:
            written[_storage(value)].append((graph_input.path, bytes_of(value.meta.get("val"))))
    return written


def _buffers(graph: fx.Graph, *, placeholders: bool = False) -> dict[fx.Node, _Buffer]:
    """Returns the tensors that the nodes of `graph` write. placeholders: whether to include its inputs."""
    skipped = unwritten(graph)
    places = {node: index for index, node in enumerate(graph.nodes)}
    last = dict(places)
    for node in reversed(graph.nodes):
        until = last[node] if node in skipped or _storage(node) is not node else places[node]
        for read in node.all_input_nodes:
            last[read] = max(last[read], until)
    return {
        node: _Buffer(size=size, birth=places[node], death=last[node])
        for node in graph.nodes
        if (node.op == "call_function" or (placeholders and node.op == "placeholder"))
        and node not in skipped
        and _storage(node) is node
        and (size := bytes_of(node.meta.get("val")))
    }


def _changes(buffers: Iterable[_Buffer]) -> dict[int, int]:
    """Returns, by node position, the bytes allocated there minus the bytes freed before it."""
    changes: defaultdict[int, int] = defaultdict(int)
    for buffer in buffers:
        changes[buffer.birth] += buffer.size
        changes[buffer.death + 1] -= buffer.size
    return changes


def _storage(node: fx.Node) -> fx.Node:
    """Returns the node that writes the memory of `node`: looks through views and waits for collectives."""
    node = base(node)
    return _storage(node.all_input_nodes[0]) if packet(node) is _WAIT else node


def _saved_as(node: fx.Node, names: set[str]) -> str:
    """Returns the name of the backward input that is `node` or a view of it; "" without such an input."""
    if node.name in names:
        return node.name
    views = (user for user in node.users if user.op == "call_function" and _storage(user) is not user)
    return next((name for view in views if (name := _saved_as(view, names))), "")
