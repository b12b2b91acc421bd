"""One sweep finds the nearest sources of every value of the forward.

A source is a layer, an attention, another product of activations, a convolution, a residual stream, a table
or an input. Marks record the operators between each source and a value. The sweep also records all residual
streams that a value depends on, at any distance, and whether a top-k chose it.

The sweep also classifies the products (see `products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    FACTOR,
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


@dataclass(kw_only=True, slots=True)
class Feeds(Origins):
    """The results of the sweep.

    before: sources of the sums and skips of residual streams, which are themselves sources. streams: numbers
    of the latest `_MOST_STREAMS` streams that each value depends on. pooled: attentions whose queries are
    parameters. number: number of the stream that a sum or a skip belongs to. chosen: values computed from
    a top-k without a layer in between, until they are back at the tokens. products: kinds of the products.
    layers: linear layers in order. groups: number of groups of features, such as gate and up, of layers whose
    groups are multiplied by each other.
    """

    before: dict[fx.Node, Marks] = field(default_factory=dict)
    streams: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    chosen: set[fx.Node] = field(default_factory=set)
    pooled: set[fx.Node] = field(default_factory=set)
    number: dict[fx.Node, int] = field(default_factory=dict)
    products: Products = field(default_factory=Products)
    layers: list[fx.Node] = field(default_factory=list)
    groups: dict[fx.Node, int] = field(default_factory=dict)


class FeedsSweep:
    """A sweep over the forward of a graph. cut: inputs from other graphs."""

    def __init__(
        self,
        depends: dict[fx.Node, Depends],
        traits: dict[fx.Node, int],
        streams: Streams,
        cut: frozenset[fx.Node],
    ) -> None:
        self.feeds = Feeds()
        self._depends = depends
        self._traits = traits
        self._streams = streams
        self._cut = cut
        self._recurrences = Recurrences()
        self._selected: dict[fx.Node, int] = {}
        self._num_streams = 0

    def run(self, nodes: Sequence[fx.Node]) -> Feeds:
        """Returns the sources of `nodes`, the forward of the graph in order."""
        feeds = self.feeds
        for node in nodes:
            arguments = node.all_input_nodes
            feeds.streams[node] = self._union_streams(arguments)
            origins = self._traced(node, arguments)
            if node in self._streams.joins or node in self._streams.skips:
                origins = self._enter_stream(node, origins)
            feeds.of_value[node] = origins
        feeds.products.finish()
        feeds.layers = [layer for layer in feeds.layers if layer not in feeds.products.no_layer]
        return feeds

    def _traced(self, node: fx.Node, arguments: list[fx.Node]) -> Marks:
        if node.op == "placeholder":
            return self._input(node)
        traits = self._traits[node]
        if traits & MATMUL:
            kind = tags_of(node)[0].kind
            if kind is Kind.LINEAR or not traits & CONVOLUTION:
                return self._matmul(node, kind)
        chosen = self.feeds.chosen
        origins = merged(self.feeds.of_value[arg] for arg in arguments)
        if traits & SELECTION or (chosen and not chosen.isdisjoint(arguments) and not self._restores(node)):
            chosen.add(node)
        if traits & LOOKUP and Depends.DATA not in self._depends[arguments[0]]:
            return self._source(node, Source.TABLE) if Depends.DATA in self._depends[node] else _NOTHING
        if not origins:
            return origins
        value = tensor(node)
        if value is not None and not (value.dtype in _NUMBERS or traits & ACTIVATION):
            return _NOTHING
        if traits & CONVOLUTION and not is_depthwise(node):
            return self._source(node, Source.CONVOLUTION)
        if traits & SCAN and node not in chosen and self.feeds.sources(origins, Source.LAYER):
            return self._source(node, Source.SCAN)
        recurrences = self._recurrences.visit(node, arguments, origins)
        if recurrences:
            self.feeds.kind.update(dict.fromkeys(recurrences, Source.SCAN))
            return dict.fromkeys(recurrences, WHOLE)
        return self._marked(node, traits, origins)

    def _restores(self, node: fx.Node) -> bool:
        """Whether `node` puts results of layers back at the tokens that a top-k chose for them."""
        name = _PUTS.get(packet(node))
        rows = None if name is None else argument_of(node, name)
        origins = self.feeds.of_value[rows] if isinstance(rows, fx.Node) else _NOTHING
        return bool(origins) and all(self.feeds.kind[source] is Source.LAYER for source in origins)

    def _input(self, node: fx.Node) -> Marks:
        value = tensor(node)
        if value is None or not value.is_floating_point() or Depends.DATA not in self._depends[node]:
            return _NOTHING
        return self._source(node, Source.CUT if node in self._cut else Source.INPUT)

    def _source(self, node: fx.Node, kind: Source) -> Marks:
        self.feeds.kind[node] = kind
        return {node: WHOLE}

    def _enter_stream(self, node: fx.Node, origins: Marks) -> Marks:
        """Makes `node`, a sum or a skip of a stream, a source of its own, and returns this source."""
        self.feeds.before[node] = origins
        self.feeds.chosen.discard(node)
        branch = self._streams.joins.get(node)
        kept = [arg for arg in node.all_input_nodes if arg is not branch]
        sources = origins if branch is None else merged(self.feeds.of_value[arg] for arg in kept)
        numbers = self.feeds.number
        earlier = [numbers[source] for source in sources if source in numbers and source is not node]
        if not earlier:
            self._num_streams += 1
            earlier = [self._num_streams]
        self.feeds.number[node] = max(earlier)
        self.feeds.streams[node] = _latest(self.feeds.streams[node] | {max(earlier)})
        return self._source(node, Source.STREAM)

    def _union_streams(self, arguments: list[fx.Node]) -> frozenset[int]:
        merged = _NO_STREAMS
        for argument in arguments:
            other = self.feeds.streams[argument]
            if other is not merged and other:
                merged = _latest(merged | other) if merged else other
        return merged

    def _marked(self, node: fx.Node, traits: int, origins: Marks) -> Marks:
        added, kept = 0, ~0
        if traits & ACTIVATION:
            added |= ACTIVATED
        if traits & CONVOLUTION:
            added |= FILTERED
        if traits & FACTOR and packet(node) is aten.mul and self._is_gate(node):
            added |= GATED
            first, second = (self.feeds.of_value[arg] for arg in node.all_input_nodes)
            for layer, marks in first.items():
                if marks & second.get(layer, 0) & GROUP:  # its groups of output features gate each other
                    self.feeds.groups[layer] = self._selected[layer]
        if packet(node) is aten.cat and self._adds_features(node):
            added |= BESIDE
        if packet(node) in (aten.select, aten.unbind) and self._selects_group(node, origins):
            added |= GROUP
        elif traits & REDUCTION or packet(node) is aten.select:
            kept = ~WHOLE
        if traits & SOFT and is_softmax(node):
            added |= SOFTMAXED
            self.feeds.products.note_softmax(
                node, softmax_dim(node), self.feeds.sources(origins, Source.LAYER)
            )
        if not added and kept == ~0:
            return origins
        return {
            source: ((marks | added) if marks & WHOLE else marks) & kept for source, marks in origins.items()
        }

    def _selects_group(self, node: fx.Node, origins: Marks) -> bool:
        """Whether `node` selects one of several groups of output features of the layers in `origins`."""
        source, dim = node.all_input_nodes[0], argument_of(node, "dim")
        if any(self.feeds.kind[origin] is not Source.LAYER for origin in origins):
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
        first, *others = (self.feeds.of_value.get(piece, _NOTHING) for piece in pieces)
        return any(other.keys() != first.keys() for other in others)

    def _is_gate(self, node: fx.Node) -> bool:
        """Whether `node` multiplies two results of products elementwise, neither with a single feature."""
        return len(node.all_input_nodes) == 2 and all(map(self._can_gate, node.all_input_nodes))

    def _can_gate(self, side: fx.Node) -> bool:
        """Whether `side` comes from a product and does not have exactly one feature."""
        value, origins = tensor(side), self.feeds.of_value.get(side, _NOTHING)
        if value is None or not value.ndim or size_or_none(value.shape[-1]) == 1:
            return False
        return any(m & WHOLE and self.feeds.kind[source] in _MULTIPLIED for source, m in origins.items())

    def _matmul(self, node: fx.Node, kind: Kind) -> Marks:
        feeds = self.feeds
        if kind is Kind.LINEAR:
            return self._linear(node)
        if kind is Kind.PRODUCT:
            return self._product(node)
        if kind is not Kind.ATTENTION:
            return self._source(node, Source.OPAQUE)
        feeds.products.attention_operator(node, feeds)
        if Depends.DATA not in self._depends[operands(node)[0]]:
            feeds.pooled.add(node)
        return self._source(node, Source.ATTENTION)

    def _linear(self, node: fx.Node) -> Marks:
        feeds, data = self.feeds, data_operand(node)
        origins = feeds.of_value.get(data, _NOTHING)
        scores = feeds.sources(origins, Source.PRODUCT)
        if origins and len(scores) == len(origins) and feeds.products.mixes_heads(node, data, scores):
            return origins
        feeds.layers.append(node)
        return self._source(node, Source.LAYER)

    def _product(self, node: fx.Node) -> Marks:
        feeds = self.feeds
        pair = [arg for arg in operands(node) if isinstance(arg, fx.Node)]
        origins = [feeds.of_value[arg] for arg in pair]
        dispatched = [arg in feeds.chosen for arg in pair]
        if any(dispatched):
            feeds.chosen.add(node)
        if not all(origins) or any(dispatched):
            return merged(self.feeds.of_value[arg] for arg in pair)
        for source in (*origins[0], *origins[1]):
            # normalised keys of a linear attention, whose second product is `node`
            if feeds.products.rests_on_queries(source):
                feeds.products.forget(source)
                feeds.kind[source] = Source.PRODUCT
        for weights, values in ((0, 1), (1, 0)):
            soft = {source: marks for source, marks in origins[weights].items() if marks & SOFTMAXED}
            if soft and feeds.products.is_attention(node, soft, pair[values], feeds):
                if feeds.products.rests_on_queries(node):
                    feeds.pooled.add(node)
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
