"""Traces a dimension of a tensor back to axes of the result of the matmul that it is computed from.

    y[b, m, n]: axis BATCH runs over b, ROW over m, COLUMN over n

`axes` follows a dimension back through views, casts and elementwise operators (`graph.dims`). A dimension
that it cannot follow has no axis.
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from mxcompile.graph.dims import before
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import numel, tags_of, tensor

BATCH, ROW, COLUMN = 1, 2, 4

_STEPS = 64


def axes(node: fx.Node, dim: int, root: fx.Node, through: Container[fx.Node] = ()) -> int:
    """Returns the axes of the matmul `root` from which dimension `dim` of `node` comes, as a bit mask.

    through: products with a parameter that count as elementwise.
    """
    if (value := tensor(node)) is None:
        return 0
    dims = frozenset({dim % max(value.ndim, 1)})
    for _ in range(_STEPS):
        if node is root:
            return _labels(root, dims)
        if (source := _argument_towards(node, root, through)) is None:
            return 0
        dims = before(node, source, dims)
        node = source
    return 0


def data_operand(node: fx.Node) -> fx.Node:
    """Returns the data operand of `node`, a product of data and a parameter."""
    operand = operands(node)[1 - tags_of(node)[0].tensors.index("w")]
    assert isinstance(operand, fx.Node)
    return operand


def features(node: fx.Node) -> int:
    """Returns the axis of the output features in the result of `node`, a product with a parameter."""
    return COLUMN if tags_of(node)[0].tensors[0] == "x" else ROW


def contracted(node: fx.Node) -> int:
    """Returns the dimension of `data_operand(node)` that the product `node` sums over."""
    if packet(node) is aten.convolution:
        return 1
    return -1 if tags_of(node)[0].tensors[0] == "x" else -2


def product_behind(node: fx.Node, through: Container[fx.Node]) -> fx.Node | None:
    """Returns the matmul that `node` is computed from elementwise, or None. through: see `axes`."""
    for _ in range(_STEPS):
        if _ends(node, through):
            return node
        product = next((arg for arg in node.all_input_nodes if _ends(arg, through)), None)
        following = product or _argument_towards(node, node, through)
        if following is None:
            return None
        node = following
    return None


def _labels(root: fx.Node, dims: frozenset[int]) -> int:
    if (value := tensor(root)) is None:
        return 0
    if packet(root) is aten.convolution:  # pointwise: channels are columns, pixels are rows
        return sum({COLUMN if dim == 1 else ROW for dim in dims})
    return sum({{value.ndim - 1: COLUMN, value.ndim - 2: ROW}.get(dim, BATCH) for dim in dims})


def _argument_towards(node: fx.Node, root: fx.Node, through: Container[fx.Node]) -> fx.Node | None:
    """Returns the argument of `node` that leads back to `root`: the largest computed argument."""
    if node.op != "call_function" or _ends(node, through):
        return None
    arguments = [arg for arg in node.all_input_nodes if arg is root or not _ends(arg, through)]
    if root in arguments:
        return root
    calls = (arg for arg in arguments if arg.op == "call_function")
    values = {arg: value for arg in calls if (value := tensor(arg)) is not None}
    # masks, row statistics and numbers are less than the tensor that they apply to
    ranks = {arg: (value.is_floating_point(), numel(value.shape)) for arg, value in values.items()}
    return max(ranks, key=ranks.__getitem__, default=None)


def _ends(node: fx.Node, through: Container[fx.Node]) -> bool:
    """Whether `node` is a product that ends a search. Convolutions and nodes in `through` do not end it."""
    return bool(tags_of(node)) and node not in through and packet(node) is not aten.convolution
