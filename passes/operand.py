"""The operands of a GEMM: as matrices a[…, M, K] · b[…, K, N], and at their widest.

mm, bmm, …         as they are; a vector becomes a matrix of one column
grouped gradients  dy·wᵀ and xᵀ·dy per group
pointwise conv     x[n, c, *s] is read as rows[n·s, c]; its weight [co, ci, 1, 1] as [co, ci]:
                   rows(x)·wᵀ (fprop), rows(dy)·w (dgrad), rows(dy)ᵀ·rows(x) (wgrad)

Under autocast a GEMM reads a cast of a tensor. Quantization skips that cast: an FP32 master weight is
quantized from FP32. Casts that the model writes itself stay, and so does the final rounding of a decomposed
operator (a norm, an activation): its FP32 result exists only in registers.

Autocast casts inside of an operator's call. So autocast made a cast if one call in the model's code produced
both the cast and a product; a cast in the model is a call without a product. In backward, a cast belongs to
the call whose derivative it is part of. The values of a weight that was gathered in tiles count as an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from mxcompile.formats import Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import (
    CONVERSIONS,
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    GROUPED_FALLBACK_BACKWARD,
    TRANSPARENT,
    aten,
    gradient_index,
    is_matmul_like,
    packet,
)
from mxcompile.graph.reshapes import retaken
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import lies_in_order, tensor, value_of
from mxcompile.graph.transpose import transpose
from mxcompile.ops.view import Decode

_MODEL_CAST = "aten._to_copy.default"  # by name: graphs are copied, and their operators with them
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CAST_CALLS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "convert_element_type"}
)
"""Names of calls that are casts in the model; backward nodes have the name of the forward call."""


def product_calls(graph: fx.Graph) -> frozenset[Any]:
    """Returns the calls of the model's code that made a matrix product of `graph`."""
    return frozenset(_call(node) for node in graph.nodes if is_matmul_like(node)) - {None}


def widest(node: fx.Node, builder: Builder, products: frozenset[Any]) -> fx.Node:
    """Returns the value of `node` before autocast's floating-point casts, with the same views applied.

    products: `product_calls` of the captured graph. The views are new nodes; `share` merges equal views.
    """
    chain: list[fx.Node] = []
    source = node
    widest_source: tuple[fx.Node, int] | None = None
    while packet(source) in TRANSPARENT and isinstance(source.args[0], fx.Node):
        before = source.args[0]
        if packet(source) in CONVERSIONS:
            if not _undoable(source, before, products):
                break
            widest_source = before, len(chain)
        else:
            chain.append(source)
        source = before
    if widest_source is None:
        return node
    result, depth = widest_source
    return retaken(tuple(reversed(chain[:depth])), result, builder)


def _call(node: fx.Node) -> Any:
    """Returns the innermost call of the model's code that made `node`, or None if it is unknown."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    return tuple(stack[-1]) if stack else None


def _undoable(cast: fx.Node, before: fx.Node, products: frozenset[Any]) -> bool:
    """Whether autocast inserted `cast`, between floating-point dtypes."""
    source, result = tensor(before), tensor(cast)
    if source is None or result is None:
        return False
    if str(cast.meta.get("original_aten", _MODEL_CAST)) != _MODEL_CAST:
        return False
    call = _call(cast)
    values = Decode.from_node(before)  # of a weight that was gathered in tiles
    is_gathered = values is not None and values.form.tile == Tile.SQUARE
    if call is None or (call == _call(before) and not is_gathered):
        return False
    if "source_fn_stack" in cast.meta and call not in products:
        return False
    if getattr(call[1], "__name__", call[1]) in _CAST_CALLS:
        return False
    return source.dtype in _FLOATS and result.dtype in _FLOATS and source.device == result.device


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
    is_vector = value_of(operand).ndim == 1
    return build.call(aten.unsqueeze.default, operand, 1, like=node) if is_vector else operand


def _rows(image: fx.Node, build: Builder, node: fx.Node) -> fx.Node:
    """Returns the pixels of `image` [n, c, *s] as rows [n·s, c]; a view if channels are innermost."""
    rank = image.meta["val"].ndim
    last = build.call(aten.permute.default, image, [0, *range(2, rank), 1], like=node)
    if not lies_in_order(last.meta["val"]):
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
    if statically_known_true(sym_eq(result.meta["val"].stride(), wanted.stride())):
        return result
    return build.call(aten.clone.default, result, like=node, memory_format=torch.contiguous_format)
