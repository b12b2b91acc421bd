"""Where a graph was cut out of the model: which of its ends are the model's own.

A graph break, a bucket of DDP or a block compiled alone leaves a graph whose inputs other graphs made and
whose outputs go on into others. Nothing is guessed of what such an end hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from mxcompile.passes.roles.uses import GraphOutputs

_NO_RESULTS = ("GradAOTOutput", "InputMutationAOTOutput", "MetadataMutationAOTOutput", "TokenAOTOutput",
               "SavedForBackwards", "PhiloxUpdated")  # fmt: skip
"""What AOTAutograd returns beside the results: gradients, what in-place writes left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Cuts of a graph.

    inputs, outputs: positions of those of the captured graph that are cuts; None for all of them. By
    default the graph is a whole model.
    """

    inputs: frozenset[int] | None = frozenset()
    outputs: frozenset[int] | None = frozenset()

    @property
    def any(self) -> bool:
        """Whether there is a cut at all."""
        return self.inputs != frozenset() or self.outputs != frozenset()


def cut_inputs(graph: fx.Graph, cuts: Cuts) -> frozenset[fx.Node]:
    """The placeholders of a joint or inference graph that are cuts. Parameters among them do not matter."""
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    return frozenset(
        node for index, node in placeholders if _is_in(_position(node.meta.get("desc"), index), cuts.inputs)
    )


def ends(graph: fx.Graph, cuts: Cuts) -> GraphOutputs:
    """The outputs of the forward in a joint or inference graph, as results of the model and as cuts."""
    results: set[fx.Node] = set()
    cut: set[fx.Node] = set()
    for index, node, descriptor in _outputs(graph):
        if not any(word in type(descriptor).__name__ for word in _NO_RESULTS):
            (cut if _is_in(_position(descriptor, index), cuts.outputs) else results).add(node)
    return GraphOutputs(results=frozenset(results), cuts=frozenset(cut))


def live(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of the forward, in order: not those that backward alone reads.

    A layer whose result nothing reads (the last one of a tower that another layer's result is taken of) is
    what it would be if something did.
    """
    nodes = {
        node for _, node, descriptor in _outputs(graph) if "GradAOTOutput" not in type(descriptor).__name__
    }
    if not nodes:
        return [node for node in graph.nodes if node.op != "output"]
    nodes.update(node for node in graph.nodes if not node.users and node.op == "call_function")
    for node in reversed(graph.nodes):
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in nodes]


def _outputs(graph: fx.Graph) -> Iterator[tuple[int, fx.Node, Any]]:
    for output in graph.find_nodes(op="output"):
        returned = output.args[0]
        values = returned if isinstance(returned, list | tuple) else (returned,)
        descriptors = output.meta.get("desc") or ()
        for index, value in enumerate(values):
            if isinstance(value, fx.Node):
                yield index, value, descriptors[index] if index < len(descriptors) else None


def _position(descriptor: Any, index: int) -> int:
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    position = getattr(descriptor, "idx", index)
    return position if isinstance(position, int) else index


def _is_in(position: int, positions: frozenset[int] | None) -> bool:
    return positions is None or position in positions
