"""unregistered: find weights that are not parameters of the model.

    y = x·wᵀ    w is in an attribute, a global or a closure     a layer with the name of w
                w is an argument and a leaf with a gradient     a layer with the name of w
                w is another argument, a matrix                 a layer that stays as it is

For Dynamo such a tensor is a plain input, and `find` tags its product as a product of activations. This pass
marks the inputs that are weights of products outside of attentions, and tags the graph again.

An argument may be an activation, with a gradient or without. It is a weight if the model passes it as the
weight to ``F.linear`` or a convolution. In code without other weights, a matrix on the right of a product is
a weight too, if it is the only operand that needs a gradient, or if the other operand is a batch or computed.
An argument that a layer reads as its input is data. An argument without a gradient may still be data, so its
layer is not quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile.graph.opsets import CONVOLUTIONS, ancestors, is_matmul, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import Kind, tag_of, tagged, value_of
from mxcompile.models.names import HeldBy
from mxcompile.passes.classify import Classify
from mxcompile.passes.find import Find
from mxcompile.passes.roles.flow import WEIGHT_KEY, Depends, calls_linear, dependencies, graph_input, stored
from mxcompile.policy import ATTENTION_PRODUCTS, Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class Unregistered:
    """Marks weights. find, classify: the passes that tagged the graph."""

    name: ClassVar[str] = "unregistered"
    find: Find
    classify: Classify

    def apply(self, graph: fx.Graph) -> None:
        """Marks the weights among the inputs of `graph`. If there are any, tags `graph` again."""
        products = [node for node in graph.nodes if _is_product(node)]
        if not products:
            return
        layers = [(node, tag) for node, tag in tagged(graph) if tag.kind is Kind.LINEAR]
        read = (
            operands(node)[tag.tensors.index("x" if "x" in tag.tensors else "dy")] for node, tag in layers
        )
        data = set().union(*(ancestors(operand, is_matmul) for operand in read))
        weights = self._program_weights(graph, products)
        only_calls = bool(layers or weights)
        # arguments of a part of a model are activations of other parts
        for kind in (HeldBy.LEAF,) if self.classify.is_cut else (HeldBy.LEAF, HeldBy.ARGUMENT):
            group = self._inputs(graph, kind)
            depends = dependencies(graph, self.find.inputs, group | weights)
            for node in products:
                lhs, rhs = operands(node)
                alone = kind is HeldBy.LEAF and depends[lhs] != Depends.PARAMETER
                by_form = not only_calls and _is_matrix(rhs) and (alone or _is_batch(lhs))
                sources = (ancestors(rhs) & group) - data
                if depends[rhs] == Depends.PARAMETER and (_is_call(node) or by_form):
                    weights |= sources
                    data |= ancestors(lhs, is_matmul) if sources else set()
        for node in weights:
            node.meta[WEIGHT_KEY] = True
        if weights:
            self.find.apply(graph)
            self.classify.apply(graph)

    def _program_weights(self, graph: fx.Graph, products: Sequence[fx.Node]) -> set[fx.Node]:
        """Returns the weights of `products` that the program holds in attributes, globals or closures."""
        group = self._inputs(graph, HeldBy.HELD)
        depends = dependencies(graph, self.find.inputs, group) if group else {}
        weights: set[fx.Node] = set()
        for node in products if group else ():
            lhs, rhs = operands(node)
            fixed = [side for side in (lhs, rhs) if depends[side] == Depends.PARAMETER]
            if len(fixed) == 1:
                weights |= ancestors(fixed[0])
            elif fixed and (_is_call(node) or (_is_matrix(rhs) and _is_batch(lhs))):
                weights |= ancestors(rhs)
        return weights & group

    def _inputs(self, graph: fx.Graph, kind: HeldBy) -> set[fx.Node]:
        """Returns the inputs of `graph` that the program holds in the way `kind`."""
        pairs = ((node, graph_input(node, self.find.inputs)) for node in graph.find_nodes(op="placeholder"))
        return {node for node, captured in pairs if captured is not None and captured.unregistered is kind}


def _is_product(node: fx.Node) -> bool:
    """Whether `find` tagged `node` as a product of activations, and `classify` not as attention."""
    tag = tag_of(node)
    if tag is None or tag.kind is not Kind.PRODUCT or tag.gemm is not Gemm.FPROP:
        return False
    return is_matmul(node) and tag.role not in ATTENTION_PRODUCTS


def _is_call(node: fx.Node) -> bool:
    """Whether `node` comes from a call of `F.linear` or a convolution, which takes a weight as an operand."""
    named = calls_linear(node) or packet(node) in CONVOLUTIONS
    return named and stored(operands(node)[0]) is not stored(operands(node)[1])


def _is_matrix(operand: fx.Node) -> bool:
    """Whether `operand` is a two-dimensional input or a view of it."""
    source = stored(operand)
    return source.op == "placeholder" and value_of(source).ndim == 2


def _is_batch(operand: fx.Node) -> bool:
    """Whether `operand` is computed, or an input with more than two dimensions."""
    source = stored(operand)
    return source.op != "placeholder" or value_of(source).ndim > 2
