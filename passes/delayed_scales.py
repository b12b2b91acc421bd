"""State of delayed scales: the casts of a graph read scales from it, and write amaxes for the next call.

    scale of x, w or dy  ←  state of the layer            slot of the layer  ←  amaxes of its casts

If one cast serves several layers (q, k and v), it reads the state of the first layer, and writes its amax for
all of them. If a layer runs several times in a graph, its largest amax counts.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import AmaxKind, Format
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten
from mxcompile.graph.tags import STATE_KEY, GemmTag, value_of
from mxcompile.ops.view import arguments_of
from mxcompile.passes.roles.flow import input_index, stored
from mxcompile.policy import Gemm

FORWARD = "mx_forward_slot"
"""`node.meta` key: the slot belongs to forward, so it holds the amaxes of x and w."""


class States:
    """The states of delayed scaling of the layers of one graph."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._of_layer: dict[str, fx.Node] = {}
        self._amaxes: dict[tuple[fx.Node, str], list[fx.Node]] = {}

    def state_of(self, tag: GemmTag, operands: tuple[fx.Node, fx.Node]) -> fx.Node | None:
        """Returns the state at the weight that a GEMM or its fprop reads, or None without a state."""
        if "w" in tag.tensors:
            state = stored(operands[tag.tensors.index("w")]).meta.get(STATE_KEY)
            if state is not None and tag.gemm is Gemm.FPROP:
                self._of_layer[tag.layer] = state
        return self._of_layer.get(tag.layer)

    def scale(
        self, state: fx.Node, operand: str, source: fx.Node, fmt: Format, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Returns the scale for `source`, and the value that this call adds to the state."""
        call, row, value = self._build.call, ops.OPERANDS.index(operand), value_of(source)
        amax = call(ops.largest, source, like=like)
        if fmt.amax.kind is AmaxKind.EMA:
            amax = call(ops.mean, state, row, amax, str(fmt), like=like)
            return call(ops.known_scale, amax, 0, str(fmt), value.ndim, like=like), amax
        return call(ops.known_scale, state, row, str(fmt), value.ndim, like=like), amax

    def add(self, state: fx.Node, operand: str, amax: fx.Node) -> None:
        """Adds `amax` to the slot of `operand`."""
        slots = self._amaxes.setdefault((state, operand), [])
        if amax not in slots:
            slots.append(amax)

    def fill(self) -> None:
        """Writes the values from `add` into the slots of the graph, and 0 into slots without a value."""
        graph = self._build.graph
        (output,) = graph.find_nodes(op="output")
        for node in graph.find_nodes(op="call_function", target=ops.slot):
            of_forward = node.meta.get(FORWARD, False)
            with graph.inserting_before(output):
                rows = [self._row(node, operand, of_forward) for operand in ops.OPERANDS]
                self._build.replace(node, self._build.call(aten.cat.default, rows, like=node))

    def _row(self, node: fx.Node, operand: str, of_forward: bool) -> fx.Node:
        state = argument(node)
        slots = self._amaxes.get((state, operand), []) if (operand != "dy") == of_forward else []
        if slots:
            maximum = functools.partial(self._build.call, aten.maximum.default, like=node)
            return functools.reduce(maximum, slots)
        value = value_of(node)
        options = {"dtype": torch.float32, "device": value.device}
        return self._build.call(aten.full.default, [1], 0.0, like=node, **options)


def histories(graph: fx.Graph, first: int) -> tuple[tuple[int, int], ...]:
    """Returns (position among all states, number of calls in its history) of each state that `graph` reads.

    first: position of the first state among the inputs of the captured graph.
    """
    lengths: dict[int, int] = {}
    for op in (ops.known_scale, ops.mean):
        for node in graph.find_nodes(op="call_function", target=op):
            arguments = arguments_of(node)
            if (position := input_index(arguments["state"])) is not None:
                lengths[position - first] = Format.parse(arguments["fmt"]).amax.history
    return tuple(sorted(lengths.items()))
