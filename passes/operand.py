"""Where an operand of a GEMM really comes from: its widest value.

A GEMM reads views of a tensor, under autocast narrowed first. Quantizing undoes that cast: an FP32 master
weight is quantized as FP32. Casts that the model writes itself count and stay, as does the rounding with
which a decomposed operator (a norm, an activation) ends: its FP32 is a register, not a value the model has.

Autocast casts inside of the call it is for, so a cast is its own if the same call of the model's code made a
product; a model's cast is a call of its own. A gradient's cast is of the call whose derivative it is part of.
Values of a weight that was gathered in tiles stand for an input, whatever call reads them first.
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
"""How a model writes a cast: what its derivative in backward is called after."""


def product_calls(graph: fx.Graph) -> frozenset[Any]:
    """The calls of the model's code that made a matrix product of `graph`."""
    return frozenset(_call(node) for node in graph.nodes if is_matmul_like(node)) - {None}


def widest(node: fx.Node, builder: Builder, products: frozenset[Any]) -> fx.Node:
    """`node` before any cast of autocast's between floating-point dtypes, with the same views after it.

    products: `product_calls` of the graph as captured. The views are applied anew, before `node` is used;
    equal ones are merged by the pass `share`.
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
    """The innermost call of the model's code that `node` comes from, or None if that is not known."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    return tuple(stack[-1]) if stack else None


def _undoable(cast: fx.Node, before: fx.Node, products: frozenset[Any]) -> bool:
    """Whether autocast put in `cast`, between floating-point dtypes."""
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
    if _name(call) in _CAST_CALLS:
        return False
    return source.dtype in _FLOATS and result.dtype in _FLOATS and source.device == result.device


def _is_gathered(node: fx.Node) -> bool:
    """Whether `node` is the values of a weight that was gathered in tiles."""
    values = Decode.of(node)
    return values is not None and values.form.tile == Tile.SQUARE


def _name(call: Any) -> str:
    function = call[1]
    return function if isinstance(function, str) else str(getattr(function, "__name__", function))
