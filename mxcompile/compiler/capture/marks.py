"""Marks nodes of Dynamo's graph for the passes, which run on AOTAutograd's graph.

    torch.func.grad, vjp, jacrev    the call that computes gradients is marked
    torch.func.jvp, jacfwd          the tangent beside a value becomes a node of its own, which is marked
    autocast(enabled=False)         every node within it is marked, if an outer autocast is enabled

AOTAutograd treats operators of such derivatives as forward operators, without tangents among the inputs or
tags for the partitioner. It copies the metadata ``custom`` from a node of Dynamo's graph to all operators
that it creates for it, where the passes read it. Inductor removes the tangent's node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mxcompile.graph.bodies import bodies
from mxcompile.graph.tags import AUTOCAST_KEY
from mxcompile.passes.roles.flow import DERIVATIVE_KEY, Depends

_GRADIENTS = frozenset({"_autograd_grad", "grad"})
"""Functions of `torch.func` that compute gradients, and Dynamo's capture of `torch.autograd.grad`."""
_DUALS = frozenset({"_make_dual", "make_dual"})


def mark(gm: fx.GraphModule) -> None:
    """Marks the nodes of `gm` and of its subgraphs."""
    _mark_autocast(gm.graph, [])
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and sum(map(_mark_derivative, [*module.graph.nodes])):
            module.recompile()


def _mark_derivative(node: fx.Node) -> bool:
    """Marks a gradient call, or the tangent of a dual. Returns whether the graph has changed."""
    name = _function(node)
    if name in _GRADIENTS:
        _note(node, DERIVATIVE_KEY, Depends.GRADIENT.value)
    if name not in _DUALS or not isinstance(tangent := node.args[1], fx.Node):
        return False
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.clone, (tangent,))
    copy.meta = dict(node.meta)
    _note(copy, DERIVATIVE_KEY, Depends.TANGENT.value)
    node.update_arg(1, copy)
    return True


def _mark_autocast(graph: fx.Graph, regions: list[tuple[Any, Any]]) -> None:
    """Marks nodes where autocast is disabled within an enabled autocast.

    regions: (device, enabled) of each autocast around `graph`.
    """
    for node in graph.nodes:
        name = _function(node)
        if name == "_enter_autocast":
            device, _, enabled, *_ = node.args
            regions.append((device, enabled))
        elif name == "_exit_autocast":
            regions.pop()
        elif regions and not regions[-1][1]:
            device = regions[-1][0]
            if (device, True) in regions or torch.is_autocast_enabled(device):
                _note(node, AUTOCAST_KEY, True)
        for body in bodies(node):
            _mark_autocast(body.graph, [*regions])


def _function(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _note(node: fx.Node, key: str, value: Any) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), key: value}
