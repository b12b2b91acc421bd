"""The widest value of a GEMM's operand: the operand before autocast narrowed it.

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

from mxcompile.formats import Tile
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import CONVERSIONS, TRANSPARENT, is_matmul_like, packet
from mxcompile.graph.reshapes import retaken
from mxcompile.graph.tags import tensor
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
    if call is None or (call == _call(before) and not _is_gathered(before)):
        return False
    if "source_fn_stack" in cast.meta and call not in products:
        return False
    if getattr(call[1], "__name__", call[1]) in _CAST_CALLS:
        return False
    return source.dtype in _FLOATS and result.dtype in _FLOATS and source.device == result.device


def _is_gathered(node: fx.Node) -> bool:
    """Whether `node` decodes a weight that was gathered in tiles."""
    values = Decode.from_node(node)
    return values is not None and values.form.tile == Tile.SQUARE
