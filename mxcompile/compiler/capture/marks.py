"""Marks on the nodes of Dynamo's graph, for the passes over the graph that AOTAutograd makes of it.

    torch.func.grad, vjp, jacrev    the call that computes gradients is marked
    torch.func.jvp, jacfwd          the tangent beside a value gets a node of its own, which is marked
    autocast(enabled=False)         every node between its start and its end is marked, inside of an autocast

To AOTAutograd, operators of such a derivative are operators of the forward: it has no tangents among the
inputs and no tags for the partitioner. But it copies the metadata ``custom`` of a node of Dynamo's graph to
all operators that it makes of the node, where the passes read it. Inductor removes the node of a tangent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mxcompile.graph.bodies import bodies
from mxcompile.graph.tags import AUTOCAST_KEY
from mxcompile.passes.flow import DERIVATIVE_KEY, Depends

_GRADIENTS = frozenset({"_autograd_grad", "grad"})
"""Functions that compute gradients: of `torch.func`, and `torch.autograd.grad` where Dynamo captures it."""
_DUALS = frozenset({"_make_dual", "make_dual"})


def mark(gm: fx.GraphModule) -> None:
    """Mark the nodes of `gm` and of the graphs that it calls."""
    _mark_autocast(gm.graph, [])
    for module in gm.modules():
        if isinstance(module, fx.GraphModule) and sum(map(_mark_derivative, [*module.graph.nodes])):
            module.recompile()


def _mark_derivative(node: fx.Node) -> bool:
    """Mark `node` if it computes gradients, or its tangent. Returns whether the graph has changed."""
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
    """Mark the nodes where autocast is turned off inside of a region that has it.

    regions: device and state of each region that `graph` lies in.
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
