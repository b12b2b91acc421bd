"""Predicts whether Inductor fuses a product's readers into the product's kernel.

    product → +, ·, gelu … → stored, not only cast          in the product's kernel
    product → silu, · → casts                               in the cast's kernel
    product → + → a row sum (of a norm)                     in the kernel of the sum
    product + product, silu(product) · product              in the kernel of the last product
    product → SwiGLU's two gradients, stored                in a separate kernel (see `is_heavy`)

Views of the whole result do not count. The lowering calls these functions on the graph that it lowers.
"""

from __future__ import annotations

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import CopyPart
from mxcompile.graph.opsets import TRANSPARENT, argument, packet, reached
from mxcompile.graph.tags import numel, tensor
from mxcompile.graph.transpose import readers
from mxcompile.ops.view import Casts, Product

aten = torch.ops.aten


def has_epilogue(product: fx.Node) -> bool:
    """Whether only elementwise operators read `product`, and its kernel computes them and stores results."""
    uses = _users(product)
    fusible = all(is_pointwise(use) and _last(product, use) for use in uses)
    return fusible and any(map(_is_stored, uses)) and not is_heavy(product)


_FEW = 2


def is_heavy(product: fx.Node) -> bool:
    """Whether operators after `product` read or store more than two other tensors of its size.

    These operators get a separate kernel. As an epilogue they would spill registers, and on a B200 their
    memory traffic takes longer than the product, which would wait for it.
    """
    behind = {*reached([product], lambda node: filter(is_pointwise, _users(node)))} - {product}
    fused = behind | {product}
    read = {_source(arg) for node in behind for arg in node.all_input_nodes} - fused
    stored = [node for node in behind if not all(map(_is_cast, _users(node) - fused))]
    return sum(_size(node) == _size(product) for node in read) + len(stored) - 1 > _FEW


def _users(node: fx.Node) -> set[fx.Node]:
    return {use for use, _ in readers(node, _is_whole_view)}


def _is_cast(node: fx.Node) -> bool:
    """Whether `node` is a cast with a template, or a product fused with a cast."""
    cast = Casts.from_node(node)
    if cast is None:
        return node.target is ops.quantize_mm
    return all(copy.is_mx or (copy.format.packed and copy.part is CopyPart.CODES) for copy in cast.parsed)


def _source(node: fx.Node) -> fx.Node:
    """Returns the tensor that `node` is, or views as a whole."""
    while _is_whole_view(node):
        node = argument(node)
    return node


def _is_whole_view(node: fx.Node) -> bool:
    """Whether `node` is a view of its whole argument."""
    return packet(node) in TRANSPARENT and _size(node) == _size(argument(node))


def _size(node: fx.Node) -> int | None:
    value = tensor(node)
    return None if value is None else numel(value.shape)


def is_pointwise(node: fx.Node) -> bool:
    """Whether `node` calls an operator that computes each element by itself."""
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())


def _last(product: fx.Node, use: fx.Node) -> bool:
    """Whether neither `use` nor an elementwise operator after it depends on a later product."""

    def fused(node: fx.Node) -> set[fx.Node]:
        users = _users(node)
        # else `node` is stored, and its readers load it from memory
        return users if all(map(is_pointwise, users)) else set()

    def later(node: fx.Node) -> list[fx.Node]:
        return [arg for arg in node.all_input_nodes if product < arg]

    return not any(is_native(arg) for node in reached([use], fused) for arg in reached(later(node), later))


def is_native(node: fx.Node) -> bool:
    """Whether `node` is a product of MXFP8 or of packed FP4, as an MX GEMM reads them."""
    product = Product.from_node(node)
    return product is not None and (product.is_packed or product.is_mx)


def _is_stored(use: fx.Node) -> bool:
    """Whether `use`, or an elementwise result after it, must be stored; False if a reduction reads it."""
    behind = reached([use], lambda node: filter(is_pointwise, _users(node)))
    users = {user for node in behind for user in _users(node) if not is_pointwise(user)}
    if any(packet(user) in _REDUCTIONS for user in users):
        return False
    return not all(map(_is_cast, users))


_REDUCTIONS = frozenset((aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean))
