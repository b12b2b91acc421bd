"""Derivatives that the compiled code takes itself are marked in Dynamo's graph, before it is traced further.

    torch.func.grad, vjp, jacrev    one call that computes gradients: all that AOTAutograd makes of it is marked
    torch.func.jvp, jacfwd          a tangent enters beside a value: it gets a node of its own, which is marked

AOTAutograd gives the operators of such a derivative as if the forward had them: no tangents among the inputs, no
tags of the partitioner. A mark in a node's metadata (``custom``) is copied to every operator that is made of the
node. `passes.flow` reads it.
"""

from __future__ import annotations

import torch
from torch import fx

from mxcompile.passes.flow import DERIVATIVE_KEY, Depends

_GRADIENTS = frozenset({"_autograd_grad", "grad"})
"""Functions that compute gradients: that of torch.func, and ``torch.autograd.grad`` where Dynamo captures it."""
_DUALS = frozenset({"_make_dual", "make_dual"})


def mark_derivatives(gm: fx.GraphModule) -> None:
    """Mark the calls in `gm` that compute gradients, and the tangents of forward-mode derivatives."""
    for node in [*gm.graph.nodes]:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in _GRADIENTS:
            _mark(node, Depends.GRADIENT)
        elif name in _DUALS and isinstance(tangent := node.args[1], fx.Node):
            with gm.graph.inserting_before(node):
                copy = gm.graph.call_function(torch.ops.aten.alias.default, (tangent,))
            copy.meta = {key: value for key, value in tangent.meta.items() if key != "grapharg"}
            _mark(copy, Depends.TANGENT)
            node.update_arg(1, copy)
    ...
