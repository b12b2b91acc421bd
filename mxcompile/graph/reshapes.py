"""Chains of operators that reorder all elements of a tensor: following, repeating and inverting them.

`producing_call` finds the cast behind an operand of a product, through views, copies and picks of its qdata.

    q, s = quantize(w)  →  index(q, [experts])  →  t  →  scaled_mm(…)         cast; steps index, t

The same steps map w to the operand's unquantized values (`retaken`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import COPIES, PICKS, RESHAPES, VIEWS, argument, aten, packet, permutation
from mxcompile.graph.tags import hint, value_of
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
    return _reordered(start, [(permutation(step), step) for step in steps], build)


def retaken(steps: Chain, start: fx.Node, build: Builder) -> fx.Node:
    """Repeats `steps` of this graph on `start`, shaped like the input of `steps`. Returns the result."""
    for step in steps:
        start = build.call(step.target, start, *step.args[1:], like=step, **step.kwargs)
    return start


def undone(steps: Chain, end: fx.Node, build: Builder) -> fx.Node | None:
    """Applies the inverse of `steps` to `end`. Returns the result, None if it lacks a symbolic size."""
    moves = ((inverse(permutation(step) or ()), argument(step)) for step in reversed(steps))
    return _reordered(end, moves, build)


def inverse(order: Sequence[int]) -> list[int]:
    """Returns the inverse of the permutation `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def memory_order(value: Tensor) -> list[int]:
    """Returns the dimensions of `value`, from the outermost in memory to the innermost."""
    return sorted(range(value.ndim), key=lambda dim: -hint(value.stride(dim)))


def _reordered(
    node: fx.Node, moves: Iterable[tuple[list[int] | None, fx.Node]], build: Builder
) -> fx.Node | None:
    """Permutes `node` by the order in each of `moves`, or without an order reshapes it like the move's node.

    Returns None if a symbolic size is not available.
    """
    for order, like in moves:
        if order:
            node = build.call(aten.permute.default, node, order, like=node)
        elif list(map(str, value_of(node).shape)) != list(map(str, value_of(like).shape)):
            if (sizes := build.sizes(value_of(like).shape, like=node)) is None:
                return None
            node = build.call(aten.reshape.default, node, sizes, like=node)
    return node
