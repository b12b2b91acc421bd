"""Inlines nested regions (``torch.compiler.nested_compile_region``) into the graph that calls them.

    invoke_subgraph(body, name, x, w)   →   the nodes of body, with x and w in place of its inputs

A region saves compile time: Dynamo traces equal blocks once, and Inductor compiles their body once. The
passes need the whole graph, because a body does not show which parameters a call passes, and a policy may
treat two blocks differently. Results equal the model without the decorator.

The body has the module paths of the first call. In the copy for another call, the part of a path in which the
parameters of both calls differ is replaced: ``0.up`` becomes ``3.up`` if the first call passed
``0.up.weight`` and this call passes ``3.up.weight``. A region with its own compilers
(``nested_region_config``) stays a call; the pass `bodies` records its GEMMs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mxcompile.graph.bodies import bodies, operands_of
from mxcompile.models.names import GraphInput, moved, moves

Paths = dict[fx.Node, str]
"""Path of the parameter behind each input of a graph or body, "" for data."""


def inline_regions(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Inlines every nested region in `gm` and in bodies of other operators.

    inputs: descriptions of the inputs of `gm`, whose nodes must have the user's module paths already.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, inputs, strict=False)
    paths = {node: entry.path for node, entry in pairs if entry.static}
    _Inliner().inline(gm, paths)


class _Inliner:
    """One run of the inlining. firsts: parameter paths of the first call, by body."""

    def __init__(self) -> None:
        self._firsts: dict[fx.GraphModule, list[str]] = {}

    def inline(self, gm: fx.GraphModule, paths: Paths) -> None:
        """Inlines the regions of `gm`, whose inputs have `paths`."""
        changed = False
        todo = [*gm.graph.nodes]
        while todo:
            node = todo.pop(0)
            called = bodies(node)
            is_call = node.target is torch.ops.higher_order.invoke_subgraph
            if called and is_call and not called[0].meta.get("nested_region_config"):
                todo = [*self._replace(gm, node, called[0], paths), *todo]
                changed = True
                continue
            for body in called:
                operands = operands_of(node, body)
                self.inline(body, {inner: _path(outer, paths) for inner, outer in operands.items()})
        if changed:
            for node in gm.graph.find_nodes(op="get_attr"):
                if not node.users:
                    gm.graph.erase_node(node)
            gm.delete_all_unused_submodules()
            gm.recompile()

    def _replace(
        self, gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, paths: Paths
    ) -> list[fx.Node]:
        """Replaces `call` by the nodes of `body`. Returns the new nodes."""
        operands = operands_of(call, body)
        here = [_path(outer, paths) for outer in operands.values()]
        heads = moves(self._firsts.setdefault(body, here), here)
        copies: dict[fx.Node, Any] = dict(operands)
        results: Any = ()
        with gm.graph.inserting_before(call):
            for node in body.graph.nodes:
                if node.op == "output":
                    (results,) = fx.node.map_arg(node.args, copies.__getitem__)
                elif node.op != "placeholder":
                    copies[node] = copy = gm.graph.node_copy(node, copies.__getitem__)
                    _rebase(copy, heads)
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


def _rebase(node: fx.Node, heads: Mapping[str, str]) -> None:
    """Replaces prefixes in the module paths of `node`. heads: new prefix by old prefix."""
    stack = node.meta.get("nn_module_stack")
    if stack and heads:
        node.meta["nn_module_stack"] = {
            key: (moved(path, heads), *rest) for key, (path, *rest) in stack.items()
        }
