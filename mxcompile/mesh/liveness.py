"""Bytes that the graphs of a rank keep in memory while they run, node by node.

    saved      what forward keeps for backward
    working    everything else that a later node reads: results, gradients of activations, what is computed
               again

What a launch computes and nothing else reads does not reach memory (`offline.graph_work.unwritten`). Views
are the tensors that they show. Parameters and other inputs count where they are held, which is not here. A
layer that stands for c equal ones runs c times: backward is looked at as the first of them runs, when nothing
is freed yet, and as the last one does.
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
from mxcompile.passes.flow import input_of, plain_descriptor
from mxcompile.plan.repeats import Repeats

_WAIT = torch.ops._c10d_functional.wait_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LivenessPoint:
    """A node, when it runs.

    path: of its module. saved: bytes when the first of the layers runs for which the module's stands; last:
    when the last one does. working: bytes. times: how many layers the module's stands for, which is at layer,
    "" if it stands for itself. born: parameters by path with the bytes of a gradient that is complete now.
    """

    path: str
    saved: int
    last: int
    working: int
    times: int = 1
    layer: str = ""
    born: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLiveness:
    """The moments of the forward and the backward of a graph, in the order in which they run.

    saved: bytes between the two, of all layers. results: bytes of what forward returns beside.
    kept: what is saved by the modules that compute it, of one layer of those it stands for.
    """

    forward: tuple[LivenessPoint, ...]
    backward: tuple[LivenessPoint, ...] = ()
    saved: int = 0
    results: int = 0
    kept: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class _Buffer:
    """A tensor: bytes, and the places of the nodes that write it and read it last; how often, and whose."""

    size: int
    birth: int
    death: int
    times: int = 1
    keeper: str = ""


@dataclass(slots=True)
class _Sum:
    """Bytes of tensors that are equal in several layers: of all, and of all but one by the layer at hand."""

    all: int = 0
    others: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, buffer: _Buffer, sign: int = 1) -> None:
        self.all += sign * buffer.size * buffer.times
        self.others[buffer.keeper] += sign * buffer.size * (buffer.times - 1)


def live(
    forward: fx.Graph,
    backward: fx.Graph | None,
    inputs: tuple[GraphInput, ...],
    repeats: Repeats,
) -> GraphLiveness:
    """The bytes that `forward`, partitioned, and `backward` keep; a graph for inference has no backward.

    inputs: of the captured graph. repeats: which layers stand for which.
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
    graph: fx.Graph,
    buffers: dict[fx.Node, _Buffer],
    saved: dict[fx.Node, _Buffer],
    repeats: Repeats,
) -> Iterator[LivenessPoint]:
    """The moments of forward; of equal layers, of the last one."""
    before, after = _Sum(), _Sum()
    for buffer in saved.values():
        after.add(buffer)
    working = _changes(buffer for node, buffer in buffers.items() if node not in saved)
    held = 0
    for place, node in enumerate(graph.nodes):
        held += working.get(place, 0)
        own = saved.get(node)
        if own is not None:
            before.add(own)
            after.add(own, -1)
        path = module_of(node)[0]
        now = before.all + after.others[repeats.keeper(path) or ""]
        yield LivenessPoint(path=path, saved=now, last=now, working=held)


def _of_backward(
    graph: fx.Graph,
    kept: dict[str, _Buffer],
    inputs: tuple[GraphInput, ...],
    repeats: Repeats,
) -> Iterator[LivenessPoint]:
    buffers = _buffers(graph, given=True)
    born = dict(_gradients(graph, inputs))
    alive, dead = _Sum(), _Sum()
    ends: defaultdict[int, list[_Buffer]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        buffer, held = kept.get(node.name), buffers.pop(node, None)
        if buffer is not None and held is not None:
            alive.add(buffer)
            ends[held.death].append(buffer)
        elif held is not None and "tangents" in node.name:
            buffers[node] = held
    working = _changes(buffer for node, buffer in buffers.items() if node not in born)
    held_bytes = 0
    for place, node in enumerate(graph.nodes):
        held_bytes += working.get(place, 0)
        path = module_of(node)[0]
        own = repeats.keeper(path) or ""
        first, last = alive.all + dead.others[own], alive.all - alive.others[own]
        yield LivenessPoint(
            path=path,
            saved=first,
            last=last,
            working=held_bytes,
            times=repeats.count(path),
            layer=own,
            born=born.get(node, ()),
        )
        for buffer in ends.get(place, ()):
            alive.add(buffer, -1)
            dead.add(buffer)


def _gradients(
    graph: fx.Graph, inputs: tuple[GraphInput, ...]
) -> Iterator[tuple[fx.Node, tuple[tuple[str, int], ...]]]:
    """The gradients of parameters that `graph` returns: the nodes that write them, with path and bytes."""
    (outputs,) = graph.find_nodes(op="output")
    written: defaultdict[fx.Node, list[tuple[str, int]]] = defaultdict(list)
    for value, about in zip(outputs.args[0], outputs.meta.get("desc") or (), strict=False):
        known = input_of(getattr(plain_descriptor(about), "grad_of", None), inputs)
        if isinstance(value, fx.Node) and known is not None and known.static:
            written[_storage(value)].append((known.path, bytes_of(value.meta.get("val"))))
    for node, gradients in written.items():
        yield node, tuple(gradients)


def _buffers(graph: fx.Graph, *, given: bool = False) -> dict[fx.Node, _Buffer]:
    """The tensors that the nodes of `graph` write. given: with those that it is given."""
    skipped = unwritten(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    last = dict(places)
    for node in reversed(graph.nodes):
        until = last[node] if node in skipped or _storage(node) is not node else places[node]
        for read in node.all_input_nodes:
            last[read] = max(last[read], until)
    return {
        node: _Buffer(size=size, birth=places[node], death=last[node])
        for node in graph.nodes
        if (node.op == "call_function" or (given and node.op == "placeholder"))
        and node not in skipped
        and _storage(node) is node
        and (size := bytes_of(node.meta.get("val")))
    }


def _changes(buffers: Iterable[_Buffer]) -> dict[int, int]:
    """By place: bytes that come, less those that went before it."""
    changes: defaultdict[int, int] = defaultdict(int)
    for buffer in buffers:
        changes[buffer.birth] += buffer.size
        changes[buffer.death + 1] -= buffer.size
    return changes


def _storage(node: fx.Node) -> fx.Node:
    """The node that writes the memory of `node`: a view shows it, and who waits for a collective gets it."""
    node = base(node)
    return _storage(node.all_input_nodes[0]) if packet(node) is _WAIT else node


def _saved_as(node: fx.Node, names: set[str]) -> str:
    """The name under which backward is given `node`, itself or a view of it; "" if it is not."""
    if node.name in names:
        return node.name
    views = (user for user in node.users if user.op == "call_function" and _storage(user) is not user)
    return next((name for view in views if (name := _saved_as(view, names))), "")
