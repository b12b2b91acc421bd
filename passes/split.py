"""split: make a node for each gradient of an operator that computes several.

    dx, dW, db = convolution_backward(…)  →  dx = convolution_backward(…)[0], dW = …[1], db = …[2]

The following passes then find, decide and rewrite each GEMM separately. Gradients without a reader get no
node. `restore` joins the gradients that stay as they are: a graph in which nothing is quantized does not
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile.graph.opsets import CONVOLUTION_BACKWARD, GROUPED_FALLBACK_BACKWARD, packet
from mxcompile.ops.view import results_of

HALF = "mx_split"
"""`node.meta` key of a part: (name of the node that it is a part of, number of its parts)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Makes one node for each gradient of an operator that computes several."""

    name: ClassVar[str] = "split"

    def apply(self, graph: fx.Graph) -> None:
        """Splits the nodes of `graph` that compute several gradients."""
        for node in list(graph.nodes):
            op = packet(node)
            if op in CONVOLUTION_BACKWARD or str(op) == GROUPED_FALLBACK_BACKWARD:
                _split(graph, node)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    by_index: dict[int, list[fx.Node]] = {}
    for index, user in results_of(node):
        by_index.setdefault(index, []).append(user)
    for index, users in sorted(by_index.items()):
        with graph.inserting_before(node):
            part = graph.call_function(node.target, masked(node, (index,)), node.kwargs)  # type: ignore[arg-type]
        part.meta = {**node.meta, HALF: (node.name, len(by_index))}
        for user in users:
            user.replace_input_with(node, part)
    graph.erase_node(node)


def masked(node: fx.Node, indices: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns the arguments with which `node` computes only the gradients `indices`."""
    if packet(node) in CONVOLUTION_BACKWARD:
        return (*node.args[:-1], [index in indices for index in range(3)])
    return node.args
