"""What every value of a graph depends on, in one sweep."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.names import GraphInput
from mxcompile.graph.opsets import RANDOM, TRANSPARENT, packet
from mxcompile.graph.tags import tensor


class Depends(Flag):
    """What a value was computed from; a constant has no flag."""

    NOTHING = 0
    PARAMETER = auto()  # parameters and buffers
    DATA = auto()  # other inputs and random numbers
    GRADIENT = auto()  # tangents: the value belongs to backward


def dependencies(graph: fx.Graph, inputs: Sequence[GraphInput]) -> dict[fx.Node, Depends]:
    """For every node of `graph`, what it depends on. `inputs` are those of the captured graph."""
    found: dict[fx.Node, Depends] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = _of_placeholder(node, inputs)
        elif node.op == "get_attr":
            found[node] = Depends.PARAMETER if tensor(node) is not None else Depends.NOTHING
        else:
            flags = Depends.DATA if packet(node) in RANDOM else Depends.NOTHING
            for argument in node.all_input_nodes:
                flags |= found[argument]
            found[node] = flags
    return found


def _of_placeholder(node: fx.Node, inputs: Sequence[GraphInput]) -> Depends:
    if "tangents" in str(node.target):
        return Depends.GRADIENT
    if tensor(node) is None:
        return Depends.NOTHING
    known = graph_input(node, inputs)
    return Depends.PARAMETER if known is not None and known.static else Depends.DATA


def graph_input(node: fx.Node, inputs: Sequence[GraphInput]) -> GraphInput | None:
    """The captured input behind the placeholder `node` of a joint or inference graph, if it is one.

    AOTAutograd describes placeholders: the position of a plain input, the name of a lifted parameter,
    or the attribute of a tensor subclass (a DTensor's local shard) that stands for one of those.
    """
    descriptor: Any = node.meta.get("desc")
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    index = getattr(descriptor, "idx", None)
    if isinstance(index, int) and index < len(inputs):
        return inputs[index]
    target = getattr(descriptor, "target", None)
    if isinstance(target, str):
        return GraphInput(path=target, static=True)
    return None


def origin(node: fx.Node) -> fx.Node:
    """The node whose values `node` still has: back through views, casts, copies and dequantization."""
    while _is_transparent(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_transparent(node: fx.Node) -> bool:
    return packet(node) in TRANSPARENT or node.target is ops.dequantize


def stored_as(node: fx.Node) -> torch.dtype | None:
    """The element type in which the input is stored that `node` is dequantized from; None if it is not."""
    while _is_transparent(node) and isinstance(node.args[0], fx.Node):
        if node.target is ops.dequantize:
            value = tensor(origin(node))
            return value.dtype if value is not None and origin(node).op == "placeholder" else None
        node = node.args[0]
    return None
