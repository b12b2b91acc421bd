"""Transposes of the last two dimensions: looking through them and inserting them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten, permutation
from mxcompile.graph.tags import value_of


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """Returns (source, swapped): looks through transposes of the last two dimensions of `node`."""
    swapped = False
    while is_transpose(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node, swapped = source, not swapped
    return node, swapped


def is_transpose(node: fx.Node) -> bool:
    """Whether `node` is its argument with the last two dimensions swapped."""
    order = permutation(node) or []
    last = len(order) - 1
    return last > 0 and order == [*range(last - 1), last, last - 1]


def readers(
    node: fx.Node, through: Callable[[fx.Node], bool] = is_transpose
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yields (reader, operand) for every reader of `node`, following nodes that satisfy `through`."""
    pending = [(user, node) for user in reversed(node.users)]
    seen: set[fx.Node] = set()
    while pending:
        user, source = pending.pop()
        if not through(user):
            yield user, source
        elif user not in seen:
            seen.add(user)
            pending += [(further, user) for further in reversed(user.users)]


def transpose(node: fx.Node, builder: Builder) -> fx.Node:
    """Inserts a view of `node` with its last two dimensions swapped."""
    value = value_of(node)
    order = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    return builder.call(aten.permute.default, node, order, like=node)
