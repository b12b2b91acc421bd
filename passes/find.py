"""find: put a `GemmTag` on every matmul-like node and tie the GEMMs of a layer together.

    y = x·Wᵀ (fprop)    dx = dy·W (dgrad)    dW = dyᵀ·x (wgrad)

A backward GEMM belongs to the forward GEMM with the same ``seq_nr`` that shares an operand with it. Without a
sequence number the shared operand alone decides. If that is the weight, the GEMM is dgrad; if it is the
input, wgrad. The pass does not look inside of opaque operators (see `opsets.is_opaque`), and changes only
tags.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import fx

from mxcompile.graph.convolutions import is_pointwise
from mxcompile.graph.opaque import opaque_sizes, sizes_by_weight
from mxcompile.graph.opsets import (
    CONVOLUTIONS,
    OPAQUE,
    QUANTIZED_MATMULS,
    is_matmul,
    is_matmul_like,
    is_opaque,
    matrices_in_code,
    packet,
)
from mxcompile.graph.shapes import attention_sizes, matmul_sizes, operands
from mxcompile.graph.tags import GemmTag, Kind, Sizes, set_tag, size_or_none, tags_of, value_of
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import GraphInput, HeldBy, layer_name, module_of, parametrized, source_of
from mxcompile.passes.gradients import Gradients
from mxcompile.passes.layers import Weights
from mxcompile.passes.roles.flow import (
    DERIVATIVE,
    Depends,
    dependencies,
    graph_input,
    main_sources,
    origin,
    stored,
    stored_as,
)
from mxcompile.policy import Gemm, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """Tags matmuls. inputs: inputs of the captured graph. blocks: repeated blocks of the model."""

    name: ClassVar[str] = "find"
    inputs: tuple[GraphInput, ...] = ()
    blocks: Blocks = field(default_factory=Blocks)

    def apply(self, graph: fx.Graph) -> None:
        """Tags all matmul-like nodes of `graph`."""
        depends = dependencies(graph, self.inputs)
        finder = _Finder(self, depends, main_sources(graph, depends, self.inputs))
        matmuls = [node for node in graph.nodes if is_matmul_like(node)]
        for node in matmuls:
            if not depends[node] & DERIVATIVE:
                finder.tag(node)
                finder.gradients.add(node)
            elif Depends.TANGENT in depends[node]:
                finder.tag_tangent(node)
        gradients = [node for node in matmuls if depends[node] & DERIVATIVE == Depends.GRADIENT]
        unknown = [node for node in gradients if not finder.tag_backward(node) and not finder.tag_alone(node)]
        for node in unknown:
            if not finder.tag_backward(node, of_data=True):
                finder.tag_unmatched(node)
        number(matmuls)


def number(nodes: Iterable[fx.Node]) -> None:
    """Numbers the tags of `nodes` in order."""
    index = itertools.count()
    for node in nodes:
        set_tag(node, *(replace(tag, index=next(index)) for tag in tags_of(node)))


class _Finder:
    """Tags the products of one graph. sources: main input of each value (`main_sources`)."""

    def __init__(
        self, options: Find, depends: dict[fx.Node, Depends], sources: dict[fx.Node, fx.Node]
    ) -> None:
        self._options = options
        self._depends = depends
        self._sources = sources
        self._weights = Weights(depends)
        self.gradients = Gradients(depends)
        self._name_by_dy: dict[fx.Node, str] = {}

    def tag_tangent(self, node: fx.Node) -> None:
        """Tags a node of a forward-mode derivative as a product that stays as it is."""
        self.tag(node)
        set_tag(node, *(replace(tag, kind=Kind.TANGENT, tensors=("x", "x")) for tag in tags_of(node)))

    def tag_unmatched(self, node: fx.Node) -> None:
        """Tags a backward node without a forward product as a product that stays as it is."""
        self.tag(node)
        tags = [replace(tag, gemm=Gemm.DGRAD) for tag in tags_of(node)]
        set_tag(node, *(replace(tag, kind=Kind.PRODUCT) if tag.kind is Kind.LINEAR else tag for tag in tags))

    def tag_alone(self, node: fx.Node) -> bool:
        """Tags a backward node as dgrad of a layer without a forward product. Returns whether it is one.

        The gradients of ``model(x).sum()`` do not read the last layer's result, so torch erases its product.
        """
        if not is_matmul(node):
            return False
        self.tag(node)
        (tag,) = tags_of(node)
        is_layer = tag.kind is Kind.LINEAR
        if not is_layer or self.gradients.is_read(operands(node)[tag.tensors.index("w")]):
            return False
        tensors = ("dy", "w") if tag.tensors[0] == "x" else ("w", "dy")
        set_tag(node, replace(tag, gemm=Gemm.DGRAD, tensors=tensors))
        self.gradients.add_without_forward(node)
        return True

    def tag_backward(self, node: fx.Node, *, of_data: bool = False) -> bool:
        """Tags a backward node as a GEMM of its forward node's layer. Returns whether a forward node fits.

        of_data: see `Gradients.match`.
        """
        if (gradient := self.gradients.match(node, of_data=of_data)) is None:
            return False
        forward = tags_of(gradient.forward)
        if forward[0].kind is Kind.OPAQUE:
            self.tag(node)
            layers = [tag for tag in forward if tag.is_layer]
            if not (is_matmul(node) and layers):
                set_tag(node, *(_hidden_gradient(tag, forward) for tag in tags_of(node)))
                return True
            return self._tag_plain_gradient(node, layers, of_data=of_data)
        sizes = [matmul_sizes(node)] if is_matmul(node) else _sizes_of_other(node)
        set_tag(node, *_per_product(replace(forward[0], gemm=gradient.gemm, tensors=gradient.tensors), sizes))
        return True

    def _tag_plain_gradient(self, node: fx.Node, layers: Sequence[GemmTag], *, of_data: bool) -> bool:
        """Tags a plain backward product as a gradient of one of `layers`, which an operator hides.

        Returns False if it is none, and for a wgrad unless `of_data`: the dgrad that shares dy comes first.
        """
        (tag,) = tags_of(node)
        if tag.kind is Kind.LINEAR:
            gemm, tensors = Gemm.DGRAD, ("w", "dy") if tag.tensors[0] == "w" else ("dy", "w")
            fitting = [layer for layer in layers if layer.name == tag.name] or layers
        else:
            dy_is_lhs = Depends.GRADIENT in self._depends[operands(node)[0]]
            gemm, tensors = Gemm.WGRAD, ("dy", "x") if dy_is_lhs else ("x", "dy")
            size = (tag.m, tag.n) if dy_is_lhs else (tag.n, tag.m)
            fitting = [layer for layer in layers if tag.batch == 1 and _size_of_weight(layer) == size]
        if not fitting or (gemm is Gemm.WGRAD and not of_data):
            return False
        dy = origin(operands(node)[tensors.index("dy")])
        layer = next((layer for layer in fitting if layer.name == self._name_by_dy.get(dy)), fitting[0])
        if gemm is Gemm.DGRAD:
            self._name_by_dy[dy] = layer.name
        name, number = layer.name, layer.layer
        set_tag(node, replace(tag, layer=number, name=name, gemm=gemm, kind=Kind.LINEAR, tensors=tensors))
        return True

    def tag(self, node: fx.Node) -> None:
        """Tags a node as the first GEMM of a new layer."""
        path, module = module_of(node)
        held_as, source = None, None
        if is_matmul(node):
            kind, tensors = self._kind_of_matmul(node)
            if kind is Kind.LINEAR:
                weight = operands(node)[tensors.index("w")]
                source, held_as = self._weight_input(weight), stored_as(weight)
                path = layer_name(path, source.inside(path)) if source is not None else path
            sizes = [matmul_sizes(node)]
            if tensors == ("w", "x"):  # W·x: swaps m and n, so that m counts the rows of x
                batch, m, n, k = sizes[0]
                sizes = [(batch, n, m, k)]
        else:
            tensors, is_quantized = ("x", "x"), packet(node) in QUANTIZED_MATMULS
            kind = Kind.OPAQUE if is_opaque(node) else Kind.QUANTIZED if is_quantized else Kind.ATTENTION
            sizes = [] if kind is Kind.OPAQUE else _sizes_of_other(node)
        tag = GemmTag(
            layer=node.name,
            name=path,
            module=module,
            source=source_of(node),
            gemm=Gemm.FPROP,
            kind=kind,
            tensors=tensors,
            stored=held_as,
            argument=source is not None and source.unregistered is HeldBy.ARGUMENT,
            block=self._options.blocks.position(path),
        )
        set_tag(node, *(self._hidden(node, tag) if kind is Kind.OPAQUE else _per_product(tag, sizes)))

    def _hidden(self, node: fx.Node, tag: GemmTag) -> list[GemmTag]:
        """Returns `tag` for each product inside of the operator `node`; products with weights are layers."""
        weights = [operand for operand in node.all_input_nodes if self._weights.is_weight(operand)]
        sizes = opaque_sizes(node)
        if not weights or packet(node) in OPAQUE:
            is_layer = weights or matrices_in_code(node.target)
            return [_sized(replace(tag, tensors=("x", "w" if is_layer else "x")), size) for size in sizes]
        if len(sizes) == 1 or len(weights) > 1:
            sizes = sizes_by_weight(sizes, [value_of(weight) for weight in weights])
        else:  # a fused head and loss, with its gradients: all products read one weight
            weights *= len(sizes)
        tags: list[GemmTag] = []
        for weight, size in zip(weights, sizes, strict=True):
            n, k = map(size_or_none, value_of(weight).shape[-2:])
            source = self._weight_input(weight)
            layer = replace(
                _sized(tag, size),
                layer=f"{tag.layer}.{weight.name}",
                name=layer_name(tag.name, source.inside(tag.name) if source is not None else ""),
                tensors=("x", "w"),
                whole=(n, k),
            )
            tags.append(_hidden_gradient(layer, tags) if tags and tags[0].layer == layer.layer else layer)
        return tags

    def _kind_of_matmul(self, node: fx.Node) -> tuple[Kind, tuple[str, str]]:
        lhs, rhs = operands(node)
        if packet(node) in CONVOLUTIONS and not is_pointwise(node):
            return Kind.CONVOLUTION, ("x", "w")
        weights = self._weights.is_weight(lhs), self._weights.is_weight(rhs)
        if weights[1] and self._weights.makes_layer_of_parameters(node):
            return Kind.LINEAR, ("x", "w")
        if weights == (False, True) and self._weights.makes_layer(node, lhs, rhs):
            return Kind.LINEAR, ("x", "w")
        if weights == (True, False) and self._weights.makes_layer(node, rhs, lhs):
            return Kind.LINEAR, ("w", "x")
        return Kind.PRODUCT, ("x", "x")

    def _weight_input(self, weight: fx.Node) -> GraphInput | None:
        """Returns the input of the graph that `weight` is stored in or computed from."""
        tensor = stored(weight)
        source = self._sources.get(tensor)
        entry = None if source is None else graph_input(source, self._options.inputs)
        if entry is None or source is tensor:
            return entry
        return replace(entry, path=parametrized(entry.path), others=tuple(map(parametrized, entry.others)))


def _hidden_gradient(tag: GemmTag, forward: Sequence[GemmTag]) -> GemmTag:
    """Returns `tag`, of a product inside of a backward operator, as a gradient of a layer in `forward`."""
    layer = next((forward_tag for forward_tag in forward if forward_tag.name == tag.name), forward[0])
    gemm, tensors = Gemm.DGRAD, ("dy", "w") if tag.is_layer else ("x", "x")
    if layer.is_layer and tag.m != layer.m and {tag.m, tag.n} == {*_size_of_weight(layer)}:
        gemm, tensors = Gemm.WGRAD, ("dy", "x")
    return replace(tag, layer=layer.layer, name=layer.name, gemm=gemm, tensors=tensors)


def _size_of_weight(layer: GemmTag) -> tuple[int | None, int | None]:
    return layer.whole or (layer.n, layer.k)


def _sizes_of_other(node: fx.Node) -> list[Sizes]:
    """Returns the sizes of the products of a node that is not a plain matmul."""
    if packet(node) in QUANTIZED_MATMULS:
        return [matmul_sizes(node)]
    if is_opaque(node):
        return opaque_sizes(node)
    return attention_sizes(node)


def _per_product(tag: GemmTag, sizes: list[Sizes]) -> list[GemmTag]:
    """Returns one tag per product of a node; tags of attention operators have a role."""
    if tag.kind is not Kind.ATTENTION:
        return [_sized(tag, size) for size in sizes]
    half = len(sizes) // 2
    roles = [Role.ATTN_SCORES] * half + [Role.ATTN_VALUES] * half
    return [_sized(replace(tag, role=role), size) for role, size in zip(roles, sizes, strict=True)]


def _sized(tag: GemmTag, sizes: Sizes) -> GemmTag:
    batch, m, n, k = map(size_or_none, sizes)
    return replace(tag, batch=batch, m=m, n=n, k=k)
