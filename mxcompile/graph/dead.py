"""Erasing nodes that nobody reads."""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext


def eliminate(graph: fx.Graph) -> None:
    """Erase what ``graph.eliminate_dead_code()`` erases from `graph`, whose nodes are in topological order.

    Torch lints the graph and asks of every node whether it is pure, which takes longer than all the rest.
    Here only nodes without users are asked, and whoever runs a pass checks the graph after it.
    """
    random = torch._inductor.config.fallback_random if TracingContext.try_get() else True
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure(random):
            graph.erase_node(node)
    owner = graph.owning_module
    for path in {node.target for node in graph.find_nodes(op="get_attr")}:
        child = getattr(owner, str(path), None)
        if isinstance(child, fx.GraphModule):
            child.graph.eliminate_dead_code()
            child.recompile()
