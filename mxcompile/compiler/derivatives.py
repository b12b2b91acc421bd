"""Derivatives that the compiled code takes itself are marked in Dynamo's graph, before it is traced further.

    torch.func.grad, vjp, jacrev    the call that computes gradients is marked
    torch.func.jvp, jacfwd          the tangent beside a value gets a node of its own, which is marked

To AOTAutograd, operators of such a derivative are operators of the forward: it has no tangents among the
inputs and no tags for the partitioner. But it copies the metadata ``custom`` of a node of Dynamo's graph to
all operators that it makes of the node. `passes.flow` reads the mark there. Inductor removes the node of a
tangent.
"""

from __future__ import annotations

import torch
from torch import fx

from mxcompile.passes.flow import DERIVATIVE_KEY, Depends

_GRADIENTS = frozenset({"_autograd_grad", "grad"})
"""Functions that compute gradients: of `torch.func`, and `torch.autograd.grad` where Dynamo captures it."""
_DUALS = frozenset({"_make_dual", "make_dual"})


def mark_derivatives(gm: fx.GraphModule) -> None:
    """Mark the derivatives in `gm` and in the graphs that it calls."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and sum(map(_mark, [*module.graph.nodes])):
            module.recompile()


def _mark(node: fx.Node) -> bool:
    """Mark `node` or its tangent. Returns whether the graph has changed."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name in _GRADIENTS:
        _note(node, Depends.GRADIENT)
    if name not in _DUALS or not isinstance(tangent := node.args[1], fx.Node):
        return False
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.clone, (tangent,))
    copy.meta = dict(node.meta)
    _note(copy, Depends.TANGENT)
    node.update_arg(1, copy)
    return True


def _note(node: fx.Node, derivative: Depends) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), DERIVATIVE_KEY: derivative.value}
