"""Rows that ranks exchange: the collectives that send them, and operators that reorder unchanged rows."""

from __future__ import annotations

import operator

import torch
from torch import fx

from mxcompile.graph.opsets import COPIES, SIZED_VIEWS, VIEWS, argument, aten, packet, prims
from mxcompile.graph.tags import size_or_none, tensor
from mxcompile.ops.view import argument_of, result_of

_COLLECTIVES = torch.ops._c10d_functional
EXCHANGES = _COLLECTIVES.all_gather_into_tensor.default, _COLLECTIVES.all_to_all_single.default
"""Collectives whose result consists of unchanged rows of the ranks' inputs."""

_ALONG = frozenset({aten.slice, aten.split, aten.split_with_sizes, aten.index_select})
_SAME = frozenset({_COLLECTIVES.wait_tensor, operator.getitem}) | COPIES


def moved_rows(step: fx.Node) -> list[fx.Node] | None:
    """Returns the tensors whose rows (along the last dimension) `step` reorders; None if it does more.

    Rows of zeros may be added: padding, masked rows. A change of dtype counts as a move.
    """
    op = packet(step)
    if op in _SAME or is_conversion(step):
        return [argument(step)]
    if op in _ALONG:
        return [argument(step)] if _spares_rows(step, argument(step)) else None
    if op is aten.cat:
        parts = argument_of(step, "tensors")
        return [part for part in parts if not is_zero(part)] if _spares_rows(step, parts[0]) else None
    if op is aten.index:
        value, indices = tensor(argument(step)), argument_of(step, "indices")
        spared = value is not None and (len(indices) < value.ndim or indices[-1] is None)
        return [argument(step)] if spared else None
    if op is aten.index_put:
        return _scattered(step)
    if op is aten.slice_scatter:
        base = argument(step)
        return [argument(step, 1)] if is_zero(base) and _spares_rows(step, base) else None
    if op is aten.constant_pad_nd:
        last = argument_of(step, "pad")[:2]
        return [argument(step)] if [*last] == [0, 0] and is_zero(argument_of(step, "value")) else None
    if op is aten.where:
        return _masked(step)
    value = tensor(step)
    rows = tensor(argument(step)) if op is aten.permute or op in SIZED_VIEWS else None
    if value is None or rows is None or not isinstance(value.shape[-1], int):
        return None
    if value.shape[-1] != size_or_none(rows.shape[-1]):
        return None
    if op is aten.permute and argument_of(step, "dims")[-1] % value.ndim != value.ndim - 1:
        return None
    return [argument(step)]


def arrives(node: fx.Node) -> bool:
    """Whether all rows of `node`, except rows of zeros, come from a collective."""
    pending, seen = [node], set()
    while pending:
        step = pending.pop()
        if step in seen or step.target in EXCHANGES:
            continue
        seen.add(step)
        if not (rows := moved_rows(step)):
            return False
        pending += rows
    return True


def is_conversion(step: fx.Node) -> bool:
    """Whether `step` changes the dtype and nothing else."""
    return step.target is prims.convert_element_type.default


def is_zero(node: object) -> bool:
    """Whether `node` is a tensor of zeros, also through views of static shape, or the number 0."""
    if isinstance(node, fx.Node) and packet(node) in VIEWS:
        value = tensor(node)
        is_static = value is not None and all(isinstance(size, int) for size in value.shape)
        return is_static and is_zero(argument(node))
    if isinstance(node, fx.Node):
        return packet(node) is aten.full and is_zero(node.args[1])
    return isinstance(node, int | float) and str(float(node)) == "0.0"


def _spares_rows(step: fx.Node, rows: fx.Node) -> bool:
    value, dim = tensor(rows), argument_of(step, "dim")
    return value is not None and isinstance(dim, int) and dim % value.ndim != value.ndim - 1


def _scattered(step: fx.Node) -> list[fx.Node] | None:
    """Returns the rows that `step` writes into zeros, or None if several rows may be added at one index.

    The gradient of a permutation has this form. Adding a row to zero only changes the sign of a negative
    zero, which does not change a product.
    """
    base, indices, values, *accumulate = step.args
    rows, value = tensor(values), tensor(step)
    if rows is None or value is None or not is_zero(base) or not isinstance(values, fx.Node):
        return None
    if not isinstance(indices, list | tuple) or len(indices) != 1 or not 1 < rows.ndim == value.ndim:
        return None
    (sort, result), index = result_of(indices[0]), tensor(indices[0])
    is_permutation = sort is not None and packet(sort) is aten.sort and result == 1
    unique = is_permutation and index is not None and index.ndim == 1
    return [values] if unique or not any(accumulate) else None


def _masked(step: fx.Node) -> list[fx.Node] | None:
    """Returns the rows if `step` sets whole rows to zero by a mask."""
    mask, rows, other = step.args
    value, shown = tensor(step), tensor(mask)
    if value is None or shown is None or not isinstance(rows, fx.Node) or not is_zero(other):
        return None
    same = tensor(rows) is not None and tensor(rows).ndim == value.ndim  # type: ignore[union-attr]
    return [rows] if same and shown.ndim == value.ndim and size_or_none(shown.shape[-1]) == 1 else None
