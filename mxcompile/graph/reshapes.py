"""Chains of operators that reorder all elements of a tensor: following, repeating and inverting them.

`producing_call` finds the cast behind an operand of a product, through views, copies and picks of its qdata.

    q, s = quantize(w)  →  index(q, [experts])  →  t  →  scaled_mm(…)         cast; steps index, t

The same steps map w to the operand's unquantized values (`retaken`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import COPIES, PICKS, RESHAPES, VIEWS, argument, aten, packet, permutation
from mxcompile.graph.tags import value_of
from mxcompile.ops.view import result_of

Chain = tuple[fx.Node, ...]
"""Nodes in order. Each reads the previous node."""


def is_step(node: fx.Node) -> bool:
    """Whether `node` has exactly the elements of its first argument, in any order."""
    return packet(node) in RESHAPES or packet(node) in COPIES


def chain_to(node: fx.Node) -> tuple[fx.Node, Chain]:
    """Returns the node that `node` is a reordering of, and the steps from there to `node`."""
    steps = []
    while is_step(node):
        steps.append(node)
        node = argument(node)
    return node, tuple(reversed(steps))


def producing_call(part: fx.Node) -> tuple[fx.Node, Chain]:
    """Returns the call that produces `part` (an operand's qdata or scales), and the steps to `part`."""
    steps: list[fx.Node] = []
    while packet(part) in VIEWS | COPIES | PICKS and part.target is not aten.view.dtype:
        steps.append(part)
        part = argument(part)
    call, _ = result_of(part)
    return part if call is None else call, tuple(reversed(steps))


def repeated(steps: Chain, start: fx.Node, build: Builder) -> fx.Node | None:
    """Repeats `steps` of any graph on `start`. Returns the result, None if it lacks a symbolic size."""
    result: fx.Node | None = start
    for step in steps:
        if result is not None:
            dims = permutation(step)
            result = _permuted(result, dims, build) if dims else _shaped(result, step, build)
    return result


def retaken(steps: Chain, start: fx.Node, build: Builder) -> fx.Node:
    """Repeats `steps` of this graph on `start`, shaped like the input of `steps`. Returns the result."""
    for step in steps:
        start = build.call(step.target, start, *step.args[1:], like=step, **step.kwargs)
    return start


def undone(steps: Chain, end: fx.Node, build: Builder) -> fx.Node | None:
    """Applies the inverse of `steps` to `end`. Returns the result, None if it lacks a symbolic size."""
    result: fx.Node | None = end
    for step in reversed(steps):
        if result is not None:
            dims = permutation(step)
            if dims:
                result = _permuted(result, inverse(dims), build)
            else:
                result = _shaped(result, argument(step), build)
    return result


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of the permutation `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def memory_order(strides: Sequence[int]) -> list[int]:
    """Returns the dimensions of a tensor with `strides`, from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _permuted(node: fx.Node, order: Sequence[int], build: Builder) -> fx.Node:
    return build.call(aten.permute.default, node, list(order), like=node)


def _shaped(node: fx.Node, like: fx.Node, build: Builder) -> fx.Node | None:
    """Returns `node` reshaped to the shape of `like`; None if a symbolic size is not available."""
    value, wanted = value_of(node), value_of(like)
    if list(map(str, value.shape)) == list(map(str, wanted.shape)):
        return node
    sizes = build.sizes(wanted.shape, like=node)
    return None if sizes is None else build.call(aten.reshape.default, node, sizes, like=node)
