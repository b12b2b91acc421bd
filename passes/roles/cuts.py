"""Outputs of a graph that may be cut out of a model: results of the model, or values for other graphs.

A graph break, a bucket of DDP or a block compiled alone leaves a graph that reads values of other graphs and
returns values to them. The passes guess nothing about the model beyond such ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from mxcompile.passes.roles.flow import DERIVATIVE, Depends, is_derivative

_NO_RESULTS = ("GradAOTOutput", "InputMutationAOTOutput", "MetadataMutationAOTOutput", "TokenAOTOutput",
               "SavedForBackwards", "PhiloxUpdated")  # fmt: skip
"""Kinds of outputs that AOTAutograd adds to the results: gradients, values after in-place writes."""


def ends(graph: fx.Graph, depends: Mapping[fx.Node, Depends]) -> frozenset[fx.Node]:
    """Returns the outputs of the forward in a joint or inference graph: results of the model, or cuts.

    If the code takes derivatives itself, the forward also ends in values that only derivatives read, such as
    a loss that the code does not return.
    """
    outputs = frozenset(
        node
        for node, descriptor in _outputs(graph)
        if not any(word in type(descriptor).__name__ for word in _NO_RESULTS)
    )
    if any(map(is_derivative, graph.nodes)):
        outputs = outputs.union(
            node
            for node in graph.nodes
            if node.users
            and not depends[node] & DERIVATIVE
            and all(depends[n] & DERIVATIVE for n in node.users)
        )
    return outputs


def live(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes of the forward in order, without nodes that only backward reads.

    Keeps layers whose results have no reader, for example the last layers of a tower from which the model
    takes an earlier result: they get the role that they would have with a reader.
    """
    nodes = {node for node, descriptor in _outputs(graph) if "GradAOTOutput" not in type(descriptor).__name__}
    if not nodes:
        return [node for node in graph.nodes if node.op != "output"]
    nodes.update(node for node in graph.nodes if not node.users and node.op == "call_function")
    for node in reversed(graph.nodes):
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in nodes]


def _outputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, Any]]:
    """Yields the outputs that are nodes, and their descriptors from AOTAutograd."""
    for output in graph.find_nodes(op="output"):
        returned = output.args[0]
        values = returned if isinstance(returned, list | tuple) else (returned,)
        descriptors = output.meta.get("desc") or ()
        for index, value in enumerate(values):
            if isinstance(value, fx.Node):
                yield value, descriptors[index] if index < len(descriptors) else None
