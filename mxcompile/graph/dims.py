"""Maps dimensions of a tensor back through views to dimensions of the source tensor.

    x[a, b, c] ─ view [a·b, c] ─ permute ─▶ y[c, a·b]     dimension 1 of y comes from 0 and 1 of x

A reshape maps groups of dimensions with equal products of sizes.
"""

from __future__ import annotations

from torch import fx

from mxcompile.graph.opsets import SIZED_VIEWS, aten, packet, permutation
from mxcompile.graph.tags import hint, tensor
from mxcompile.ops.view import argument_of

_REGROUPED = SIZED_VIEWS | {aten.unflatten, aten.squeeze}


def before(node: fx.Node, source: fx.Node, dims: frozenset[int]) -> frozenset[int]:
    """Returns the dimensions of `source`, an argument of `node`, that dimensions `dims` of `node` come from.

    Operators other than views count as elementwise.
    """
    old, new = tensor(source), tensor(node)
    if old is None or new is None:
        return dims
    op_packet = packet(node)
    if op_packet in _REGROUPED:
        return _through_reshape(list(map(hint, old.shape)), list(map(hint, new.shape)), dims)
    if (order := permutation(node)) is not None:
        return frozenset(order[dim] for dim in dims if dim < len(order))
    if op_packet is aten.as_strided and old.shape != new.shape:
        return frozenset()
    if op_packet is aten.unsqueeze:
        at = argument_of(node, "dim") % new.ndim
        return frozenset(dim - (dim > at) for dim in dims if dim != at)
    if op_packet is aten.select:
        at = argument_of(node, "dim") % old.ndim
        return frozenset(dim + (dim >= at) for dim in dims)
    shift = new.ndim - old.ndim  # elementwise: aligned at the end
    return frozenset(dim - shift for dim in dims if 0 <= dim - shift < old.ndim)


def _through_reshape(old: list[int], new: list[int], dims: frozenset[int]) -> frozenset[int]:
    """Returns the dimensions of shape `old` that hold the elements of dimensions `dims` of shape `new`."""
    result: set[int] = set()
    i = j = 0
    while i < len(old) and j < len(new):
        old_start, new_start = i, j
        old_size, new_size = old[i], new[j]
        i, j = i + 1, j + 1
        while old_size != new_size:
            if old_size < new_size and i < len(old):
                old_size *= old[i]
                i += 1
            elif old_size > new_size and j < len(new):
                new_size *= new[j]
                j += 1
            else:
                return frozenset()
        group = range(new_start, j)
        if any(dim in dims and new[dim] != 1 for dim in group) or (len(group) == 1 and group[0] in dims):
            result.update(dim for dim in range(old_start, i) if old[dim] != 1 or i - old_start == 1)
    return frozenset(result)
