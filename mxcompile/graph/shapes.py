"""Operands and sizes of the matrix products inside a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from mxcompile.graph.attention import ATTENTION_FORWARD, ATTENTIONS
from mxcompile.graph.convolutions import convolution_sizes
from mxcompile.graph.opsets import (
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


def qkv(node: fx.Node) -> Sequence[Any]:
    """Returns q, k and v of an attention node, forward or backward."""
    first = 0 if packet(node) in ATTENTION_FORWARD else ATTENTIONS[packet(node)].before_q
    return node.args[first : first + 3]


def attention_sizes(node: fx.Node) -> list[Sizes]:
    """Sizes of the products in an attention node.

    An attention forward has two, q·kᵀ and softmax·v, its backward four: dQ and dK, dP and dV.
    """
    what, scores, values = packet(node), UNKNOWN, UNKNOWN
    q, k, v = map(tensor, qkv(node))
    if q is not None and k is not None and v is not None and q.ndim > 2:
        tokens = ATTENTIONS[what].tokens
        others = [*q.shape[:-1]]
        queries, keys, batch = others.pop(tokens + 1), k.shape[tokens], math.prod(others)
        scores, values = (batch, queries, keys, q.shape[-1]), (batch, queries, v.shape[-1], keys)
    if what in ATTENTION_FORWARD:
        return [scores, values]
    return [*gradient_sizes(scores), *gradient_sizes(values)]
