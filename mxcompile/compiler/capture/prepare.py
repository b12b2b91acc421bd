"""Prepares Dynamo's graph for passes on AOTAutograd's graph: marks nodes, inlines regions, copies it.

    torch.func.grad, vjp, jacrev    the call that computes gradients is marked
    torch.func.jvp, jacfwd          the tangent beside a value becomes a node of its own, which is marked
    autocast(enabled=False)         every node within it is marked, if an outer autocast is enabled

AOTAutograd treats operators of such derivatives as forward operators, without tangents among the inputs or
tags for the partitioner. It copies the metadata ``custom`` from a node of Dynamo's graph to all operators
that it creates for it, where the passes read it. Inductor removes the tangent's node.

    invoke_subgraph(body, name, x, w)   →   the nodes of body, with x and w in place of its inputs

A nested region (``torch.compiler.nested_compile_region``) saves compile time: Dynamo traces equal blocks
once, and Inductor compiles their body once. The passes need the whole graph, because a body does not show
which parameters a call passes, and a policy may treat two blocks differently. Results equal the model without
the decorator.

The body has the module paths of the first call. In the copy for another call, the part of a path in which the
parameters of both calls differ is replaced: ``0.up`` becomes ``3.up`` if the first call passed
``0.up.weight`` and this call passes ``3.up.weight``. A region with its own compilers
(``nested_region_config``) stays a call; the pass `bodies` records its GEMMs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import fx

from mxcompile.graph.bodies import bodies, operands_of
from mxcompile.graph.tags import AUTOCAST_KEY
from mxcompile.models.names import GraphInput, moved, moves
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


Paths = dict[fx.Node, str]
"""Path of the parameter behind each input of a graph or body, "" for data."""


def inline_regions(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Inlines every nested region in `gm` and in bodies of other operators.

    inputs: descriptions of the inputs of `gm`, whose nodes must have the user's module paths already.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, inputs, strict=False)
    _inline(gm, {node: entry.path for node, entry in pairs if entry.static}, {})


def _inline(gm: fx.GraphModule, paths: Paths, firsts: dict[fx.GraphModule, list[str]]) -> None:
    """Inlines the regions of `gm`, whose inputs have `paths`. firsts: paths of the first call, by body."""
    changed = False
    todo = [*gm.graph.nodes]
    while todo:
        node = todo.pop(0)
        called = bodies(node)
        is_call = node.target is torch.ops.higher_order.invoke_subgraph
        if called and is_call and not called[0].meta.get("nested_region_config"):
            here = [_path(outer, paths) for outer in operands_of(node, called[0]).values()]
            heads = moves(firsts.setdefault(called[0], here), here)
            todo = [*_replace(gm, node, called[0], heads), *todo]
            changed = True
            continue
        for body in called:
            operands = operands_of(node, body)
            _inline(body, {inner: _path(outer, paths) for inner, outer in operands.items()}, firsts)
    if changed:
        for node in gm.graph.find_nodes(op="get_attr"):
            if not node.users:
                gm.graph.erase_node(node)
        gm.delete_all_unused_submodules()
        gm.recompile()


def _replace(
    gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, heads: Mapping[str, str]
) -> list[fx.Node]:
    """Replaces `call` by the nodes of `body`, with new `heads` of module paths. Returns the new nodes."""
    copies: dict[fx.Node, Any] = operands_of(call, body)
    results: Any = ()
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                (results,) = fx.node.map_arg(node.args, copies.__getitem__)
            elif node.op != "placeholder":
                copies[node] = copy = gm.graph.node_copy(node, copies.__getitem__)
                stack = node.meta.get("nn_module_stack")
                if stack and heads:
                    moved_stack = {key: (moved(path, heads), *rest) for key, (path, *rest) in stack.items()}
                    copy.meta["nn_module_stack"] = moved_stack
                if copy.op == "get_attr":
                    copy.target = _add_attribute(gm, body, str(node.target))
    for user in [*call.users]:
        assert user.target is operator.getitem, f"{user} reads all results of {call}"
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    return [copies[node] for node in body.graph.nodes if node.op not in ("placeholder", "output")]


def _path(operand: Any, paths: Paths) -> str:
    return paths.get(operand, "") if isinstance(operand, fx.Node) else ""


def _add_attribute(gm: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    """Returns the name in `gm` for attribute `name` of `body`, after adding the attribute if necessary."""
    value: Any = operator.attrgetter(name)(body)
    fresh, number = name.replace(".", "_"), 0
    while getattr(gm, fresh, value) is not value:
        number += 1
        fresh = f"{name}_{number}".replace(".", "_")
    setattr(gm, fresh, value)
    return fresh


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns `gm` with a copied graph, the same parameters, and Dynamo's notes about its inputs."""
    result = fx.GraphModule(gm, deepcopy(gm.graph))
    result.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        result._param_name_to_source = gm._param_name_to_source
    for old, new in zip(gm.graph.nodes, result.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
            new.meta.pop("grapharg", None)  # it refers to the parameter; only Dynamo's graph needs it
    return result
