"""Chains of operators that move a tensor's elements about and lose none: followed, repeated, undone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import COPIES, RESHAPES, argument, aten, packet, permutation
from mxcompile.graph.tags import value_of

Chain = tuple[fx.Node, ...]
"""Every one reads the one before."""


def is_step(node: fx.Node) -> bool:
    """Whether `node` has the elements of its first argument, in some order."""
    return packet(node) in RESHAPES or packet(node) in COPIES


def chain_to(node: fx.Node) -> tuple[fx.Node, Chain]:
    """Where the elements of `node` come from, and the steps from there to it."""
    steps = []
    while is_step(node):
        steps.append(node)
        node = argument(node)
    return node, tuple(reversed(steps))


def repeated(steps: Chain, start: fx.Node, build: Builder) -> fx.Node | None:
    """`start` taken through `steps`, whose graph may be another; None if a size is not at hand."""
    result: fx.Node | None = start
    for step in steps:
        if result is not None:
            dims = permutation(step)
            result = _permuted(result, dims, build) if dims else _shaped(result, step, build)
    return result


def retaken(steps: Chain, start: fx.Node, build: Builder) -> fx.Node:
    """`start`, in the shape of what `steps` begin with, taken through the same steps in the same graph."""
    for step in steps:
        start = build.call(step.target, start, *step.args[1:], like=step, **step.kwargs)
    return start


def undone(steps: Chain, end: fx.Node, build: Builder) -> fx.Node | None:
    """Returns the node that `steps` have made `end` of; None if a size is not at hand."""
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
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions of a tensor with `strides`, the innermost in memory last."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _permuted(node: fx.Node, order: Sequence[int], build: Builder) -> fx.Node:
    return build.call(aten.permute.default, node, list(order), like=node)


def _shaped(node: fx.Node, like: fx.Node, build: Builder) -> fx.Node | None:
    """`node` in the shape of `like`; None if a size is not at hand."""
    value, wanted = value_of(node), value_of(like)
    if list(map(str, value.shape)) == list(map(str, wanted.shape)):
        return node
    sizes = build.sizes(wanted.shape, like=node)
    return None if sizes is None else build.call(aten.reshape.default, node, sizes, like=node)
