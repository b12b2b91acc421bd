"""Operands and sizes of the matrix products inside a node."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from mxcompile.graph.convolutions import convolution_sizes
from mxcompile.graph.opsets import (
    ATTENTION_FORWARD,
    BIASED,
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    GROUPED_FALLBACK_BACKWARD,
    aten,
    gradient_index,
    is_grouped,
    packet,
)
from mxcompile.graph.tags import UNKNOWN, Sizes, tensor


def operands(node: fx.Node) -> tuple[Any, Any]:
    """The left and right argument of a matmul node, q and k of an attention forward.

    Of one of several gradients (see `passes/split`): the gradient of the result and what it is multiplied by,
    in the order of the product.
    """
    what = packet(node)
    if what in CONVOLUTION_BACKWARD:
        return node.args[0], node.args[2 - gradient_index(node)]
    if str(what) == GROUPED_FALLBACK_BACKWARD:
        x, w, _, dy = node.args
        return (dy, w) if gradient_index(node) == 0 else (x, dy)
    first = 1 if what in BIASED else 0
    return node.args[first], node.args[first + 1]


def offsets(node: fx.Node) -> Any:
    """Where the groups of a grouped product end; None if it has no such argument."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")


def matmul_sizes(node: fx.Node) -> Sizes:
    """Sizes of a matmul node's product; a vector counts as a matrix of one column or row."""
    if packet(node) in CONVOLUTIONS:
        return convolution_sizes(node)
    left, right = (tensor(operand) for operand in operands(node))
    if left is None or right is None:
        return UNKNOWN
    a, b = list(left.shape), list(right.shape)
    if is_grouped(node):
        if str(packet(node)) == GROUPED_FALLBACK_BACKWARD:  # one operand is read transposed
            transposed = b if gradient_index(node) == 0 else a
            transposed[-2:] = transposed[:-3:-1]
        return _grouped_sizes(a, b, node)
    if packet(node) is aten.linear:
        b.reverse()
    if len(a) == 1:
        a.insert(0, 1)
    if len(b) == 1:
        b.append(1)
    return math.prod(a[:-2]), a[-2], b[-1], a[-1]


def gradient_sizes(sizes: Sizes) -> list[Sizes]:
    """Sizes of the two products that the gradients of one of `sizes` are."""
    batch, m, n, k = sizes
    return [(batch, m, k, n), (batch, n, k, m)]


def _grouped_sizes(a: list[Any], b: list[Any], node: fx.Node) -> Sizes:
    """Sizes of a grouped product: the grouped dimension counts once, as the sum over its groups."""
    if len(a) == 2 and len(b) == 2 and tensor(offsets(node)) is not None:
        return 1, a[0], b[1], a[1]
    if len(a) == 3 and len(b) == 3:
        return a[0], a[1], b[2], a[2]
    return 1, a[-2], b[-1], a[-1]


def attention_sizes(node: fx.Node) -> tuple[Sizes, Sizes]:
    """Sizes of q·kᵀ and softmax·v in an attention node, forward or backward."""
    first = 0 if packet(node) in ATTENTION_FORWARD else _first_of_qkv(node)
    q, k, v = (tensor(argument) for argument in node.args[first : first + 3])
    if q is None or k is None or v is None or q.ndim < 3:
        return UNKNOWN, UNKNOWN
    batch = math.prod(q.shape[:-2])
    queries, keys = q.shape[-2], k.shape[-2]
    return (batch, queries, keys, q.shape[-1]), (batch, queries, v.shape[-1], keys)


def _first_of_qkv(node: fx.Node) -> int:
    """Position of q: backward operators of aten start with grad_out, the higher-order one with q."""
    return 1 if str(packet(node)).startswith("aten") else 0
