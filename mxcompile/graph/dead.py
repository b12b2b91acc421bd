"""Fast dead code elimination."""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext


def eliminate(graph: fx.Graph) -> None:
    """Erases the nodes that ``graph.eliminate_dead_code()`` would erase. Nodes must be in topological order.

    Torch's version lints the graph and computes the purity of every node, which dominates its time. This
    function computes the purity of nodes without users only; the pass runner verifies the graph afterwards.
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
