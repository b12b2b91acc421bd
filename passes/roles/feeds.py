"""One sweep finds the nearest sources of every value of the forward.

A source is a layer, an attention, another product of activations, a convolution, a residual stream, a table
or an input. Marks record the operators between each source and a value. The sweep also records all residual
streams that a value depends on, at any distance, and whether a top-k chose it.

The sweep also classifies the products (see `products`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import Kind, size_or_none, tags_of, tensor, value_of
from mxcompile.ops.view import argument_of
from mxcompile.passes.roles.axes import axes, data_operand, features
from mxcompile.passes.roles.flow import Depends
from mxcompile.passes.roles.products import Products, is_softmax, softmax_dim
from mxcompile.passes.roles.recurrence import Recurrences
from mxcompile.passes.roles.sources import (
    ACTIVATED,
    BESIDE,
    FILTERED,
    GATED,
    GROUP,
    SOFTMAXED,
    WHOLE,
    Marks,
    Origins,
    Source,
    merged,
)
from mxcompile.passes.roles.streams import Streams
from mxcompile.passes.roles.traits import (
    ACTIVATION,
    CONVOLUTION,
    LOOKUP,
    MATMUL,
    REDUCTION,
    SCAN,
    SELECTION,
    SOFT,
)

MIXERS = frozenset({Source.PRODUCT, Source.SCAN})

_NOTHING: Marks = {}
_NO_STREAMS: frozenset[int] = frozenset()
_MOST_STREAMS = 16


class Feeds(Origins):
    """The sources of the values of `nodes`, the forward of a graph in order.

    before: sources of the sums and skips of residual streams, which are themselves sources. streams: numbers
    of the latest `_MOST_STREAMS` streams that each value depends on. pooled: attentions whose queries are
    parameters. number: number of the stream that a sum or a skip belongs to. chosen: values computed from
    a top-k without a layer in between, until they are back at the tokens. products: kinds of the products.
    layers: linear layers in order. groups: number of groups of features, such as gate and up, of layers whose
    groups are multiplied by each other. cut: inputs from other graphs.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        depends: dict[fx.Node, Depends],
        traits: dict[fx.Node, int],
        residual: Streams,
        cut: frozenset[fx.Node],
    ) -> None:
        super().__init__()
        self.before: dict[fx.Node, Marks] = {}
        self.streams: dict[fx.Node, frozenset[int]] = {}
        self.chosen: set[fx.Node] = set()
        self.pooled: set[fx.Node] = set()
        self.number: dict[fx.Node, int] = {}
        self.products = Products()
        self.layers: list[fx.Node] = []
        self.groups: dict[fx.Node, int] = {}
        self._depends = depends
        self._traits = traits
        self._residual = residual
        self._cut = cut
        self._recurrences = Recurrences()
        self._selected: dict[fx.Node, int] = {}
        self._num_streams = 0
        for node in nodes:
            arguments = node.all_input_nodes
            self.streams[node] = self._union_streams(arguments)
            origins = self._traced(node, arguments)
            if node in residual.joins or node in residual.skips:
                origins = self._enter_stream(node, origins)
            self.of_value[node] = origins
        self.products.finish()
        self.layers = [layer for layer in self.layers if layer not in self.products.no_layer]

    def _traced(self, node: fx.Node, arguments: list[fx.Node]) -> Marks:
        if node.op == "placeholder":
            return self._input(node)
        traits = self._traits[node]
        if traits & MATMUL:
            kind = tags_of(node)[0].kind
            if kind is Kind.LINEAR or not traits & CONVOLUTION:
                return self._matmul(node, kind)
        origins = merged(self.of_value[arg] for arg in arguments)
        if traits & SELECTION or not (self.chosen.isdisjoint(arguments) or self._restores(node)):
            self.chosen.add(node)
        if traits & LOOKUP and Depends.DATA not in self._depends[arguments[0]]:
            return self._source(node, Source.TABLE) if Depends.DATA in self._depends[node] else _NOTHING
        if not origins:
            return origins
        value = tensor(node)
        if value is not None and not (value.dtype in _NUMBERS or traits & ACTIVATION):
            return _NOTHING
        if traits & CONVOLUTION and not is_depthwise(node):
            return self._source(node, Source.CONVOLUTION)
        if traits & SCAN and node not in self.chosen and self.sources(origins, Source.LAYER):
            return self._source(node, Source.SCAN)
        if recurrences := self._recurrences.visit(node, arguments, origins):
            self.kind.update(dict.fromkeys(recurrences, Source.SCAN))
            return dict.fromkeys(recurrences, WHOLE)
        return self._marked(node, traits, origins)

    def _restores(self, node: fx.Node) -> bool:
        """Whether `node` puts results of layers back at the tokens that a top-k chose for them."""
        name = _PUTS.get(packet(node))
        rows = None if name is None else argument_of(node, name)
        origins = self.of_value[rows] if isinstance(rows, fx.Node) else _NOTHING
        return bool(origins) and all(self.kind[source] is Source.LAYER for source in origins)

    def _input(self, node: fx.Node) -> Marks:
        value = tensor(node)
        if value is None or not value.is_floating_point() or Depends.DATA not in self._depends[node]:
            return _NOTHING
        return self._source(node, Source.CUT if node in self._cut else Source.INPUT)

    def _source(self, node: fx.Node, kind: Source) -> Marks:
        self.kind[node] = kind
        return {node: WHOLE}

    def _enter_stream(self, node: fx.Node, origins: Marks) -> Marks:
        """Makes `node`, a sum or a skip of a stream, a source of its own, and returns this source."""
        self.before[node] = origins
        self.chosen.discard(node)
        branch = self._residual.joins.get(node)
        kept = [arg for arg in node.all_input_nodes if arg is not branch]
        sources = origins if branch is None else merged(self.of_value[arg] for arg in kept)
        earlier = [self.number[source] for source in sources if source in self.number]
        if not earlier:
            self._num_streams += 1
        self.number[node] = number = max(earlier, default=self._num_streams)
        self.streams[node] = _latest(self.streams[node] | {number})
        return self._source(node, Source.STREAM)

    def _union_streams(self, arguments: list[fx.Node]) -> frozenset[int]:
        merged = _NO_STREAMS
        for argument in arguments:
            other = self.streams[argument]
            if other is not merged and other:
                merged = _latest(merged | other) if merged else other
        return merged

    def _marked(self, node: fx.Node, traits: int, origins: Marks) -> Marks:
        added, kept = 0, ~0
        if traits & ACTIVATION:
            added |= ACTIVATED
        if traits & CONVOLUTION:
            added |= FILTERED
        sides = node.all_input_nodes
        if packet(node) is aten.mul and len(sides) == 2 and all(map(self._can_gate, sides)):
            added |= GATED
            first, second = (self.of_value[side] for side in sides)
            for layer, marks in first.items():
                if marks & second.get(layer, 0) & GROUP:  # its groups of output features gate each other
                    self.groups[layer] = self._selected[layer]
        if packet(node) is aten.cat and self._adds_features(node):
            added |= BESIDE
        if packet(node) in (aten.select, aten.unbind) and self._selects_group(node, origins):
            added |= GROUP
        elif traits & REDUCTION or packet(node) is aten.select:
            kept = ~WHOLE
        if traits & SOFT and is_softmax(node):
            added |= SOFTMAXED
            self.products.note_softmax(node, softmax_dim(node), self.sources(origins, Source.LAYER))
        if not added and kept == ~0:
            return origins
        whole = ((source, marks | added if marks & WHOLE else marks) for source, marks in origins.items())
        return {source: marks & kept for source, marks in whole}

    def _selects_group(self, node: fx.Node, origins: Marks) -> bool:
        """Whether `node` selects one of several groups of output features of the layers in `origins`."""
        source, dim = node.all_input_nodes[0], argument_of(node, "dim")
        if any(self.kind[origin] is not Source.LAYER for origin in origins):
            return False
        if any(axes(source, dim, layer) != features(layer) for layer in origins):
            return False
        self._selected.update(dict.fromkeys(origins, value_of(source).shape[dim]))
        return True

    def _adds_features(self, node: fx.Node) -> bool:
        """Whether `node` concatenates features of different origins."""
        pieces, dim = argument_of(node, "tensors"), argument_of(node, "dim")
        value = tensor(node)
        if value is None or dim not in (-1, value.ndim - 1):
            return False
        first, *others = (self.of_value.get(piece, _NOTHING) for piece in pieces)
        return any(other.keys() != first.keys() for other in others)

    def _can_gate(self, side: fx.Node) -> bool:
        """Whether `side` comes from a product and does not have exactly one feature."""
        value, origins = tensor(side), self.of_value.get(side, _NOTHING)
        if value is None or not value.ndim or size_or_none(value.shape[-1]) == 1:
            return False
        return any(m & WHOLE and self.kind[source] in _MULTIPLIED for source, m in origins.items())

    def _matmul(self, node: fx.Node, kind: Kind) -> Marks:
        if kind is Kind.LINEAR:
            return self._linear(node)
        if kind is Kind.PRODUCT:
            return self._product(node)
        if kind is not Kind.ATTENTION:
            return self._source(node, Source.OPAQUE)
        self.products.attention_operator(node, self)
        if Depends.DATA not in self._depends[operands(node)[0]]:
            self.pooled.add(node)
        return self._source(node, Source.ATTENTION)

    def _linear(self, node: fx.Node) -> Marks:
        data = data_operand(node)
        origins = self.of_value.get(data, _NOTHING)
        scores = self.sources(origins, Source.PRODUCT)
        if origins and len(scores) == len(origins) and self.products.mixes_heads(node, data, scores):
            return origins
        self.layers.append(node)
        return self._source(node, Source.LAYER)

    def _product(self, node: fx.Node) -> Marks:
        pair = [arg for arg in operands(node) if isinstance(arg, fx.Node)]
        origins = [self.of_value[arg] for arg in pair]
        dispatched = [arg in self.chosen for arg in pair]
        if any(dispatched):
            self.chosen.add(node)
        if not all(origins) or any(dispatched):
            return merged(self.of_value[arg] for arg in pair)
        for source in (*origins[0], *origins[1]):
            # normalised keys of a linear attention, whose second product is `node`
            if self.products.rests_on_queries(source):
                self.products.forget(source)
                self.kind[source] = Source.PRODUCT
        for weights, values in ((0, 1), (1, 0)):
            soft = {source: marks for source, marks in origins[weights].items() if marks & SOFTMAXED}
            if soft and self.products.is_attention(node, soft, pair[values], self):
                if self.products.rests_on_queries(node):
                    self.pooled.add(node)
                return self._source(node, Source.ATTENTION)
        return self._source(node, Source.PRODUCT)


_PUTS = {aten.index_add: "source", aten.index_put: "values", aten.scatter_add: "src"}
"""Operators that put rows at given indices, and the argument that holds the rows."""
_NUMBERS = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}
)
_MULTIPLIED = frozenset(
    {Source.LAYER, Source.ATTENTION, Source.PRODUCT, Source.SCAN, Source.CONVOLUTION, Source.OPAQUE}
)


def _latest(streams: frozenset[int]) -> frozenset[int]:
    if len(streams) <= _MOST_STREAMS:
        return streams
    return frozenset(sorted(streams)[-_MOST_STREAMS:])


def is_depthwise(node: fx.Node) -> bool:
    """Whether the convolution `node` keeps channels apart, so that it mixes positions alone, as a filter."""
    weight = tensor(argument_of(node, "weight"))
    return weight is not None and weight.shape[1] == 1 and not argument_of(node, "transposed")
