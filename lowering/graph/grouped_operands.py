"""The preconditions of PyTorch's grouped product: every group begins in memory at a multiple of 16 bytes.

    a[t, k] · b[g, k, n]    a group begins at a row of a: row-major, k a multiple of 8 BF16 elements
    a[g, m, k] · b[k, t]    a group begins at a column of b: column-major, k a multiple of 8
    a[m, t] · b[t, n]       a column of a and a row of b: column-major and row-major, m and n multiples of 8
    a[g, m, k]              a stack of matrices: rows or columns are a multiple of 8

PyTorch checks strides. It does not check where groups end, because the offsets are data. Inductor may change
the strides of buffers that it computes, so an operator fixes them.

Source: ``check_valid_strides`` in ``_meta_grouped_mm_common`` of ``torch/_meta_registrations.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mxcompile.graph.build import Builder
from mxcompile.graph.tags import is_empty, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.lowering.graph.lowering_pass import EMPTY

_BYTES = 16
assert inductor_prims is not None  # the import defines the operator
FORCE_ORDER = torch.ops.prims.inductor_force_stride_order.default


def unmet(a: fx.Node, b: fx.Node) -> str:
    """Returns why PyTorch's grouped product refuses these operands in every memory order, or ""."""
    values = value_of(a), value_of(b)
    if any(is_empty(value.shape) for value in values):
        return EMPTY
    for value, dims in zip(values, _innermost(*values), strict=True):
        if not any(_is_multiple(value, dim) for dim in dims):
            sizes = " or ".join(str(value.shape[dim]) for dim in dims)
            return f"PyTorch's grouped product takes rows of multiples of {_BYTES} bytes ({sizes} elements)"
        if dims == (-2,) and statically_known_true(value.shape[-1] == 1):
            return "PyTorch's grouped product takes a single column for a row"
    return ""


def in_order(a: fx.Node, b: fx.Node, build: Builder) -> tuple[fx.Node, fx.Node]:
    """Returns both operands in a memory order that the product takes. Requires that `unmet` is ""."""
    lhs, rhs = _innermost(value_of(a), value_of(b))
    return _ordered(a, lhs, build), _ordered(b, rhs, build)


def _innermost(a: Tensor, b: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of each operand that may be innermost in memory."""
    match a.ndim, b.ndim:
        case 2, 2:
            return (-2,), (-1,)
        case 2, 3:
            return (-1,), (-1, -2)
        case 3, 2:
            return (-1, -2), (-2,)
        case _:
            return (-1, -2), (-1, -2)


def _ordered(operand: fx.Node, dims: tuple[int, ...], build: Builder) -> fx.Node:
    value = value_of(operand)
    fitting = [dim for dim in dims if _is_multiple(value, dim)]
    if len(fitting) == 2:
        return operand
    base, swapped = untransposed(operand)
    *batch, m, n = value_of(base).shape
    by_rows = (fitting[0] == -1) != swapped
    strides = [m * n] * len(batch) + ([n, 1] if by_rows else [1, m])
    ordered = build.call(FORCE_ORDER, base, strides, like=base)
    return transpose(ordered, build) if swapped else ordered


def _is_multiple(value: Tensor, dim: int) -> bool:
    size = value.shape[dim]
    return isinstance(size, int) and size * value.itemsize % _BYTES == 0
