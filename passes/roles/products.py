"""Products that are not linear layers, though some have a parameter as an operand.

    softmax(q·kᵀ)·v         attention, spelled out; q may be a parameter, or kᵀ
    mix·softmax(mix'·q·kᵀ)  a parameter that mixes the scores of the heads
    q·rᵀ + q·kᵀ             a table of positions r, scored by the same q

The softmax behind a query that is a parameter runs over the rows, the keys; the softmax behind a router runs
over its features. A linear attention may normalise its keys over the rows too; a second product follows it.
A mix contracts the batch of the product, whereas a projection contracts features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mxcompile.graph.opsets import MAXIMA, SOFTMAX, aten, packet
from mxcompile.graph.shapes import operands, qkv
from mxcompile.graph.tags import tag_of, tags_of
from mxcompile.ops.view import argument_of, arguments_of
from mxcompile.passes.roles.axes import BATCH, COLUMN, ROW, axes, contracted, data_operand, features
from mxcompile.passes.roles.flow import origin
from mxcompile.passes.roles.sources import Marks, Origins, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """An attention that is spelled out: its scores, its queries that are parameters, and its operands."""

    scores: tuple[fx.Node, ...]
    queries: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]


@dataclass(kw_only=True, slots=True)
class Products:
    """The products of a graph, and the use of their results.

    attentions: products of probabilities and v → their attention. read: q, k and v of all attentions. biases:
    values added to the scores of attention operators. soft: products with a softmax over a layer's features,
    which are attentions if a layer follows. no_layer: products with a parameter that are not layers → reason.
    """

    attentions: dict[fx.Node, Attention] = field(default_factory=dict)
    read: set[fx.Node] = field(default_factory=set)
    biases: set[fx.Node] = field(default_factory=set)
    no_layer: dict[fx.Node, str] = field(default_factory=dict)
    soft: set[fx.Node] = field(default_factory=set)
    over_rows: set[fx.Node] = field(default_factory=set)

    def note_softmax(self, node: fx.Node, dim: int, layers: Iterable[fx.Node]) -> None:
        """Records which of `layers` the softmax `node` normalises along their rows."""
        for layer in layers:
            columns = features(layer)
            axis = axes(node, dim, layer, self.no_layer)
            if axis & (ROW | COLUMN) & ~columns and not axis & columns:
                self.over_rows.add(layer)

    def attention_operator(self, node: fx.Node, origins: Origins) -> None:
        """Records the operands of an attention operator: q, k and v, and a bias of the scores."""
        read = [arg for arg in qkv(node) if isinstance(arg, fx.Node)]
        self.read.update(read)
        for bias in (*node.args, *node.kwargs.values()):
            if isinstance(bias, fx.Node) and bias not in read:
                self.biases.add(bias)
                self._positions(origins.of_value.get(bias, {}), read, origins)

    def is_attention(self, node: fx.Node, weights: Marks, values: fx.Node, origins: Origins) -> bool:
        """Whether `node`, a product of `values` and a softmax of `weights`, is softmax(q·kᵀ)·v."""
        kinds = origins.kind
        scores = [source for source in weights if tags_of(source) and kinds[source] is Source.PRODUCT]
        queries = [source for source in weights if source in self.over_rows]
        layers = [source for source in weights if kinds[source] is Source.LAYER]
        onto_product = any(kinds[source] is Source.PRODUCT for source in origins.of_value[values])
        if not scores and (onto_product or not (queries or layers)):
            return False
        if not scores and not queries:
            self.soft.add(node)
            return True
        read = [values, *(arg for score in scores for arg in operands(score))]
        read += [data_operand(query) for query in queries]
        self._positions(weights, [arg for score in scores for arg in operands(score)], origins)
        self.attentions[node] = Attention(
            scores=tuple(scores),
            queries=tuple(queries),
            read=tuple(arg for arg in read if isinstance(arg, fx.Node)),
        )
        return True

    def rests_on_queries(self, node: fx.Node) -> bool:
        """Whether `node` is an attention whose queries are all parameters."""
        attention = self.attentions.get(node)
        return node in self.soft or (attention is not None and not attention.scores)

    def forget(self, node: fx.Node) -> None:
        """Removes `node` from the attentions."""
        self.attentions.pop(node, None)
        self.soft.discard(node)

    def finish(self) -> None:
        """Records the operands and queries of the attentions that remain at the end of the sweep."""
        for attention in self.attentions.values():
            self.read.update(attention.read)
            for query in attention.queries:
                self.no_layer[query] = "a query: softmax along its rows, the keys, and a product with values"

    def _positions(self, weights: Marks, read: Sequence[Any], origins: Origins) -> None:
        """Records the sources of an attention's scores that multiply its operands by a parameter."""
        sources = {s for arg in read if isinstance(arg, fx.Node) for s in origins.of_value.get(arg, ())}
        for source in weights:
            tag = tag_of(source)
            if tag is None or "w" not in tag.tensors or source in self.over_rows:
                continue
            data = origins.of_value.get(data_operand(source), {})
            if data and set(data) <= sources and not origins.sources(data, Source.STREAM):
                self.no_layer[source] = "scores: a query of the attention whose scores it is added to"

    def mixes_heads(self, node: fx.Node, data: fx.Node, scores: Sequence[fx.Node]) -> bool:
        """Whether `node` mixes heads: it multiplies `data`, computed from `scores` alone, by a parameter."""
        dim = contracted(node)
        if any(axes(data, dim, score, self.no_layer) != BATCH for score in scores):
            return False
        self.no_layer[node] = "a mix of the heads' scores: it contracts the batch of a product"
        return True


def is_softmax(node: fx.Node) -> bool:
    """Whether `node` is a softmax, or the exponential of a decomposed softmax: exp(x − max x)."""
    return packet(node) in SOFTMAX or (packet(node) is aten.exp and _maximum(node) is not None)


def softmax_dim(node: fx.Node) -> int:
    """Returns the dimension that a softmax runs over."""
    if packet(node) in SOFTMAX:
        dim = argument_of(node, "dim")
    else:
        maximum = _maximum(node)
        dim = -1 if maximum is None else arguments_of(maximum).get("dim")
    if isinstance(dim, list | tuple):
        dim = dim[0] if dim else -1
    return dim if isinstance(dim, int) else -1


def _maximum(node: fx.Node) -> fx.Node | None:
    """Returns the maximum in exp(x − max x), or None."""
    if not isinstance(node.args[0], fx.Node):
        return None
    shifted = origin(node.args[0])
    if packet(shifted) is not aten.sub or not isinstance(shifted.args[1], fx.Node):
        return None
    subtracted = origin(shifted.args[1])
    candidates = [subtracted]
    if packet(subtracted) is aten.where:  # replaces the maximum of rows that are fully masked
        candidates = [origin(arg) for arg in subtracted.all_input_nodes]
    for candidate in candidates:
        source = candidate if packet(candidate) in MAXIMA else (candidate.args or (None,))[0]
        if isinstance(source, fx.Node) and packet(source) in MAXIMA:
            return source
    return None
