"""The operands of a GEMM as matrices a[…, M, K] · b[…, K, N], and its result in the operator's shape.

mm, bmm, …         as they are; a vector becomes a matrix of one column
grouped gradients  dy·wᵀ and xᵀ·dy per group
pointwise conv     x[n, c, *s] is read as rows[n·s, c]; its weight [co, ci, 1, 1] as [co, ci]:
                   rows(x)·wᵀ (fprop), rows(dy)·w (dgrad), rows(dy)ᵀ·rows(x) (wgrad)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import (
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    GROUPED_FALLBACK_BACKWARD,
    aten,
    gradient_index,
    packet,
)
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import value_of
from mxcompile.graph.transpose import transpose


def matrices(node: fx.Node, build: Builder) -> tuple[fx.Node, fx.Node]:
    """Returns the two operands of the GEMM `node` as a[…, M, K] and b[…, K, N]."""
    lhs, rhs = operands(node)
    op = packet(node)
    if op in CONVOLUTIONS:
        weight_or_rows = op in CONVOLUTION_BACKWARD and gradient_index(node) == 1
        if weight_or_rows:
            return transpose(_rows(lhs, build, node), build), _rows(rhs, build, node)
        weight = build.call(aten.view.default, rhs, list(rhs.meta["val"].shape[:2]), like=node)
        weight = weight if op in CONVOLUTION_BACKWARD else transpose(weight, build)
        return _rows(lhs, build, node), weight
    if str(op) == GROUPED_FALLBACK_BACKWARD:
        if gradient_index(node) == 0:
            return lhs, transpose(rhs, build)
        return transpose(lhs, build), rhs
    return _matrix(lhs, build, node), _matrix(rhs, build, node)


def _matrix(operand: fx.Node, build: Builder, node: fx.Node) -> fx.Node:
    value = value_of(operand)
    return operand if value.ndim > 1 else build.call(aten.unsqueeze.default, operand, 1, like=node)


def _rows(image: fx.Node, build: Builder, node: fx.Node) -> fx.Node:
    """Returns the pixels of `image` [n, c, *s] as rows [n·s, c]; a view if channels are innermost."""
    rank = image.meta["val"].ndim
    last = build.call(aten.permute.default, image, [0, *range(2, rank), 1], like=node)
    if not last.meta["val"].is_contiguous():
        last = build.call(aten.clone.default, last, like=node, memory_format=torch.contiguous_format)
    return build.call(aten.view.default, last, [-1, image.meta["val"].shape[1]], like=node)


def as_returned(product: fx.Node, node: fx.Node, build: Builder) -> fx.Node:
    """Returns `product`, of the `matrices` of convolution `node`, in shape and strides of `node`'s result."""
    image = operands(node)[0]
    if packet(node) not in CONVOLUTION_BACKWARD:
        return _image(product, image, value_of(node), build, node)
    result = value_of(next(iter(node.users)))
    if gradient_index(node) == 0:
        return _image(product, image, result, build, node)
    return build.call(aten.view.default, product, list(result.shape), like=node)


def _image(product: fx.Node, image: fx.Node, wanted: torch.Tensor, build: Builder, node: fx.Node) -> fx.Node:
    """Returns rows [n·s, c] as [n, c, *s], with the sizes of `image` and the strides of `wanted`."""
    rank = wanted.ndim
    sizes: list[Any] = [build.size(image, dim, like=node) for dim in (0, *range(2, rank))]
    last = build.call(aten.view.default, product, [*sizes, wanted.shape[1]], like=node)
    result = build.call(aten.permute.default, last, [0, rank - 1, *range(1, rank - 1)], like=node)
    if result.meta["val"].stride() == wanted.stride():
        return result
    return build.call(aten.clone.default, result, like=node, memory_format=torch.contiguous_format)
