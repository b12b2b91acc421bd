"""State of scales that follow from calls before: the casts of a graph read it, and leave it anew.

    scale of x, w or dy  ←  state of the layer            slot of the layer  ←  what its casts saw

One cast may serve several layers (q, k and v): it reads the state of the first, and all of them get what it
saw. Of a layer that runs several times in a graph the largest counts.
"""

from __future__ import annotations

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import AmaxKind, Format
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument, aten
from mxcompile.graph.tags import STATE_KEY, GemmTag, value_of
from mxcompile.ops.view import arguments_of
from mxcompile.passes.flow import input_index, stored
from mxcompile.policy import Gemm

FORWARD = "mx_forward_slot"
"""Where a slot says that it is the one of forward, of x and w."""


class States:
    """The states of one graph."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._of_layer: dict[str, fx.Node] = {}
        self._seen: dict[tuple[fx.Node, str], list[fx.Node]] = {}

    def of(self, tag: GemmTag, operands: tuple[fx.Node, fx.Node]) -> fx.Node | None:
        """The state of the layer of a GEMM, from the weight that it reads or that its forward did."""
        if "w" in tag.tensors:
            state = stored(operands[tag.tensors.index("w")]).meta.get(STATE_KEY)
            if state is not None and tag.gemm is Gemm.FPROP:
                self._of_layer[tag.layer] = state
        return self._of_layer.get(tag.layer)

    def scale(
        self, state: fx.Node, operand: str, source: fx.Node, fmt: Format, like: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """The scale for `source`, and what this call adds to the state."""
        call, row, value = self._build.call, ops.OPERANDS.index(operand), value_of(source)
        seen = call(ops.largest, source, like=like)
        if fmt.amax.kind is AmaxKind.EMA:
            seen = call(ops.mean, state, row, seen, str(fmt), like=like)
            return call(ops.known_scale, seen, 0, str(fmt), value.ndim, like=like), seen
        return call(ops.known_scale, state, row, str(fmt), value.ndim, like=like), seen

    def add(self, state: fx.Node, operand: str, seen: fx.Node) -> None:
        """Leave `seen` in the slot of `operand`."""
        slots = self._seen.setdefault((state, operand), [])
        if seen not in slots:
            slots.append(seen)

    def fill(self) -> None:
        """Put into the slots of the graph what was left for them, 0 where nothing was."""
        graph = self._build.graph
        (output,) = graph.find_nodes(op="output")
        for node in graph.find_nodes(op="call_function", target=ops.slot):
            of_forward = node.meta.get(FORWARD, False)
            with graph.inserting_before(output):
                rows = [self._row(node, operand, of_forward) for operand in ops.OPERANDS]
                self._build.replace(node, self._build.call(aten.cat.default, rows, like=node))

    def _row(self, node: fx.Node, operand: str, of_forward: bool) -> fx.Node:
        state = argument(node)
        slots = self._seen.get((state, operand), []) if (operand != "dy") == of_forward else []
        if slots:
            most = slots[0]
            for other in slots[1:]:
                most = self._build.call(aten.maximum.default, most, other, like=node)
            return most
        value = value_of(node)
        options = {"dtype": torch.float32, "device": value.device}
        return self._build.call(aten.full.default, [1], 0.0, like=node, **options)


def histories(graph: fx.Graph, first: int) -> tuple[tuple[int, int], ...]:
    """Returns, for each state that `graph` reads, its position among them, and how many calls count.

    first: position of the first state among the inputs of the captured graph.
    """
    lengths: dict[int, int] = {}
    for op in (ops.known_scale, ops.mean):
        for node in graph.find_nodes(op="call_function", target=op):
            given = arguments_of(node)
            position = input_index(given["state"])
            if position is not None:
                lengths[position - first] = Format.of(given["fmt"]).amax.history
    return tuple(sorted(lengths.items()))
