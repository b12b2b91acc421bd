"""Where an operand of a GEMM really comes from: its widest value.

A GEMM reads views of a tensor, under autocast narrowed first. Quantizing undoes the cast: an FP32 master
weight is quantized as FP32. Only casts of the model are undone, not the rounding with which a decomposed
operator (a norm, an activation) ends: its FP32 is a register, not a value the model has.
"""

from __future__ import annotations

import torch
from torch import fx

from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import CASTS, TRANSPARENT, packet
from mxcompile.graph.tags import tensor

_MODEL_CAST = "aten._to_copy.default"  # by name: graphs are copied, and their operators with them
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def widest(node: fx.Node, builder: Builder) -> fx.Node:
    """`node` before any cast between floating-point dtypes, with the same views after it.

    The views are applied anew, before `node` is used; equal ones are merged by the pass `share`.
    """
    chain: list[fx.Node] = []
    source = node
    found: tuple[fx.Node, int] | None = None
    while packet(source) in TRANSPARENT and isinstance(source.args[0], fx.Node):
        before = source.args[0]
        if packet(source) in CASTS:
            if not _undoable(source, before):
                break
            found = before, len(chain)
        else:
            chain.append(source)
        source = before
    if found is None:
        return node
    result, depth = found
    for view in reversed(chain[:depth]):
        result = builder.call(view.target, result, *view.args[1:], like=view, **view.kwargs)
    return result


def _same_call(cast: fx.Node, before: fx.Node) -> bool:
    """Whether one call in the model's code made both, a norm's say, which casts its result itself."""
    outer, inner = (node.meta.get("source_fn_stack") or () for node in (cast, before))
    return bool(outer) and outer[-1:] == inner[-1:]


def _undoable(cast: fx.Node, before: fx.Node) -> bool:
    """Whether a cast is one the model makes, between floating-point dtypes."""
    source, result = tensor(before), tensor(cast)
    if source is None or result is None:
        return False
    if str(cast.meta.get("original_aten", _MODEL_CAST)) != _MODEL_CAST or _same_call(cast, before):
        return False
    return source.dtype in _FLOATS and result.dtype in _FLOATS and source.device == result.device
