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
    """Returns the left and right operand of a matmul node, or q and k of an attention forward.

    A node that computes one of several gradients (see `passes/split`) has the result's gradient and the other
    factor as operands, in the order of the product.
    """
    op_packet = packet(node)
    if op_packet in CONVOLUTION_BACKWARD:
        return node.args[0], node.args[2 - gradient_index(node)]
    if str(op_packet) == GROUPED_FALLBACK_BACKWARD:
        x, w, _, dy = node.args
        return (dy, w) if gradient_index(node) == 0 else (x, dy)
    first = 1 if op_packet in BIASED else 0
    return node.args[first], node.args[first + 1]


def offsets(node: fx.Node) -> Any:
    """Returns the end offsets of the groups of a grouped product; None without such an argument."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")


def matmul_sizes(node: fx.Node) -> Sizes:
    """Returns the sizes of a matmul node's product; a vector counts as a matrix with one column or row."""
    if packet(node) in CONVOLUTIONS:
        return convolution_sizes(node)
    lhs, rhs = (tensor(operand) for operand in operands(node))
    if lhs is None or rhs is None:
        return UNKNOWN
    a, b = list(lhs.shape), list(rhs.shape)
    if is_grouped(node):
        if str(packet(node)) == GROUPED_FALLBACK_BACKWARD:  # one operand is read transposed
            transposed = b if gradient_index(node) == 0 else a
            transposed[-2:] = transposed[:-3:-1]
        batch = a[0] if len(a) == 3 and len(b) == 3 else 1  # a grouped dimension sums over all groups
        return batch, a[-2], b[-1], a[-1]
    if packet(node) is aten.linear:
        b.reverse()
    if len(a) == 1:
        a.insert(0, 1)
    if len(b) == 1:
        b.append(1)
    return math.prod(a[:-2]), a[-2], b[-1], a[-1]


def gradient_sizes(sizes: Sizes) -> list[Sizes]:
    """Returns the sizes of the two products that compute the gradients of a product of `sizes`."""
    batch, m, n, k = sizes
    return [(batch, m, k, n), (batch, n, k, m)]


def qkv(node: fx.Node) -> Sequence[Any]:
    """Returns q, k and v of an attention node, forward or backward."""
    first = 0 if packet(node) in ATTENTION_FORWARD else ATTENTIONS[packet(node)].before_q
    return node.args[first : first + 3]


def attention_sizes(node: fx.Node) -> list[Sizes]:
    """Returns the sizes of the products in an attention node.

    Forward has two products, q·kᵀ and softmax·v; backward has four: dQ and dK, dP and dV.
    """
    op_packet, scores, values = packet(node), UNKNOWN, UNKNOWN
    q, k, v = map(tensor, qkv(node))
    if q is not None and k is not None and v is not None and q.ndim > 2:
        tokens = ATTENTIONS[op_packet].tokens
        others = [*q.shape[:-1]]
        queries, keys, batch = others.pop(tokens + 1), k.shape[tokens], math.prod(others)
        scores, values = (batch, queries, keys, q.shape[-1]), (batch, queries, v.shape[-1], keys)
    if op_packet in ATTENTION_FORWARD:
        return [scores, values]
    return [*gradient_sizes(scores), *gradient_sizes(values)]
