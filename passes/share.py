"""share: merge equal casts, and the equal views that they read.

q, k and v each read a view of one activation; after this pass they read one view and one cast of it. The pass
merges only deterministic operators, and only within one checkpointing region. Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import CONVERSIONS, VIEWS, packet
from mxcompile.graph.tags import PASS_KEY, tags_of

_MERGED = VIEWS | CONVERSIONS | ops.CASTS | {operator.getitem}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Merges equal casts, and the equal views that they read."""

    name: ClassVar[str] = "share"

    def apply(self, graph: fx.Graph) -> None:
        """Merges equal nodes of `graph` into the first of them."""
        first: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or tags_of(node):
                continue
            if packet(node) not in _MERGED and PASS_KEY not in node.meta:
                continue
            region = node.meta.get("recompute"), node.meta.get("ac_graph_id")
            key = node.target, _frozen(node.args), _frozen(node.kwargs), region
            original = first.setdefault(key, node)
            # a mask read twice is two unknown sizes in the graph, but fake tensors remember one for each mask
            if original is not node and not any(user.meta.get("unbacked_bindings") for user in node.users):
                node.replace_all_uses_with(original)
                graph.erase_node(node)


def _frozen(value: Any) -> Any:
    """Returns `value` in a hashable form that distinguishes 1, 1.0 and True."""
    if isinstance(value, fx.Node):  # most values
        return value
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return type(value), value
