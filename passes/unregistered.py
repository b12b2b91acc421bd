"""unregistered: a tensor that multiplies activations is a weight, also where it is not a parameter.

    y = x·wᵀ    w held by an attribute, a global, a closure          a layer, called what w is called there
                w an argument that needs a gradient of its own       the same
                w another argument, a matrix                         a layer that stays as it is

Dynamo hands over such a tensor as it hands over data, and `find` takes its product for one of activations.
This pass marks the inputs that are weights of products outside of attentions, and tags the graph anew. A
product of two inputs of the same kind has a weight only if the model calls ``F.linear``, or multiplies a
batch or a computed value with a matrix. An argument without a gradient may be data, so its layer is not
quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile.graph.opsets import CONVOLUTIONS, is_matmul, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import Kind, tag_of, value_of
from mxcompile.models.names import GraphInput
from mxcompile.models.names import Unregistered as Where
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find
from mxcompile.passes.flow import WEIGHT_KEY, Depends, dependencies, graph_input, stored
from mxcompile.policy import Gemm, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Unregistered:
    """Options: `find` and `classify`, the passes that tagged the graph.

    is_cut: whether the graph is a part of a model, where arguments are activations of other parts.
    """

    name: ClassVar[str] = "unregistered"
    find: Find
    classify: Classify
    is_cut: bool = False

    def apply(self, graph: fx.Graph) -> None:
        """Mark the weights among the inputs of `graph`. If there are any, tag it anew."""
        kinds = (Where.HELD, Where.LEAF) if self.is_cut else (Where.HELD, Where.LEAF, Where.ARGUMENT)
        products = [node for node in graph.nodes if _is_product(node)]
        weights: set[fx.Node] = set()
        for kind in kinds if products else ():
            weights |= self._weights(graph, kind, products, weights)
        for node in weights:
            node.meta[WEIGHT_KEY] = True
        if weights:
            self.find.apply(graph)
            self.classify.apply(graph)

    def _weights(
        self, graph: fx.Graph, kind: Where, products: Iterable[fx.Node], known: set[fx.Node]
    ) -> set[fx.Node]:
        """Returns the inputs of `kind` that are weights of `products`. known: other weights."""
        inputs = self.find.inputs
        group = {node for node in graph.find_nodes(op="placeholder") if _is_from(node, kind, inputs)}
        if not group:
            return set()
        depends = dependencies(graph, inputs, group | known)
        sources: set[fx.Node] = set()
        for node in products:
            weight = _weight(node, kind, depends)
            if weight is not None:
                sources |= _sources(weight)
        return sources & group


def _is_product(node: fx.Node) -> bool:
    """Whether `node` is a product of activations in no attention, as far as `find` and `classify` know."""
    tag = tag_of(node)
    if tag is None or tag.kind is not Kind.PRODUCT or tag.gemm is not Gemm.FPROP:
        return False
    return is_matmul(node) and tag.role not in (Role.ATTN_SCORES, Role.ATTN_VALUES)


def _is_from(node: fx.Node, kind: Where, inputs: Sequence[GraphInput]) -> bool:
    known = graph_input(node, inputs)
    return known is not None and known.unregistered is kind


def _weight(node: fx.Node, kind: Where, depends: dict[fx.Node, Depends]) -> fx.Node | None:
    """The operand of the product `node` that is a weight, if inputs of `kind` count as such."""
    left, right = operands(node)
    fixed = tuple(depends[operand] == Depends.PARAMETER for operand in (left, right))
    if kind is Where.ARGUMENT or fixed == (True, True):
        return right if fixed[1] and _looks_like_layer(node, left, right) else None
    return right if fixed[1] else left if fixed[0] else None


def _looks_like_layer(node: fx.Node, left: fx.Node, right: fx.Node) -> bool:
    """Whether `node` multiplies `left` with the weight `right` by its form."""
    data, weight = stored(left), stored(right)
    call = (node.meta.get("source_fn_stack") or [("", "")])[-1][1]
    if getattr(call, "__name__", call) == "linear" or packet(node) in CONVOLUTIONS:
        return data is not weight
    is_matrix = weight.op == "placeholder" and value_of(weight).ndim == 2
    return is_matrix and (data.op != "placeholder" or value_of(data).ndim > 2)


def _sources(operand: fx.Node) -> set[fx.Node]:
    """The nodes that `operand` is computed from."""
    pending, seen = [operand], set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return seen
