"""Uses of every value of the forward before the next layer, in one sweep from the end.

    QKV       operand q, k or v of an attention          BRANCH    a term of a residual sum
    SCORES    a bias of scores, or scores                 STARTS    the first value of a residual stream
    MIXED     an operand of a product or scan that        CHOOSES   enters a top-k whose result is used
              a layer reads                               SHIFTS    scales or shifts a stream that it does
    LAYER     the input of a layer                                  not depend on
    WEIGHED   multiplied by a choice of a top-k           SCALES    multiplies a stream, broadcast over it
    RESULT    an output of the model                      CUT       leaves the graph, not the model

BRANCH and STARTS pass only linear operators; the other marks pass any operator. Only QKV, MIXED, SCORES and
BRANCH pass a residual sum, and RESULT if its stream is at the end of the model (`_endings`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import Kind, numel, tags_of, tensor
from mxcompile.passes.roles.axes import data_operand
from mxcompile.passes.roles.feeds import MIXERS, Feeds, is_depthwise
from mxcompile.passes.roles.sources import BENT, Source
from mxcompile.passes.roles.streams import Streams
from mxcompile.passes.roles.traits import CONVOLUTION, FACTOR, LINEAR, MATMUL, SELECTION, SUM

QKV, SCORES, MIXED, LAYER, BRANCH, STARTS = 1, 2, 4, 8, 16, 32
CHOOSES, SHIFTS, SCALES, WEIGHED, RESULT, CUT, CONVOLVED, SELECTS = 64, 128, 256, 512, 1024, 2048, 4096, 8192

ONWARD = QKV | MIXED | LAYER | BRANCH | STARTS | CONVOLVED
"""Marks of values from which the model computes later values."""

_ALONG_LINEAR = BRANCH | STARTS
_PAST_SUMS = QKV | MIXED | SCORES | BRANCH
_OF_INDICES = ONWARD & ~_ALONG_LINEAR | CHOOSES | SELECTS | RESULT | CUT


class UsesSweep:
    """A sweep over the forward of a graph from its end."""

    def __init__(self, traits: dict[fx.Node, int], feeds: Feeds, streams: Streams) -> None:
        self._traits = traits
        self.uses: dict[fx.Node, int] = {}
        self._feeds = feeds
        self._streams = streams
        self._layers = frozenset(feeds.layers)
        self._endings = _endings(feeds, streams)

    def run(self, nodes: Sequence[fx.Node], ends: Collection[fx.Node], end: int) -> dict[fx.Node, int]:
        """Returns the uses of `nodes`, the forward of the graph in order, as sums of the marks above.

        ends: outputs of the graph. end: their mark, `RESULT` or `CUT`.
        """
        for node in reversed(nodes):
            self.uses[node] = self._used(node, end if node in ends else 0)
        return self.uses

    def _used(self, node: fx.Node, here: int) -> int:
        if node in self._feeds.products.read:
            here |= QKV
        if node in self._streams.skips:  # uses of the stream are not uses of its first value
            here &= self._passing_marks(node) | LAYER | CUT
            here |= STARTS if self._starts_stream(node) else 0
        if node in self._feeds.products.biases:
            here |= SCORES
        for user in node.users:
            if (there := self.uses.get(user)) is not None:
                here |= self._uses_by(node, user, there)
        if node in self._feeds.products.soft and here & LAYER:
            self._feeds.products.read.update(arg for arg in operands(node) if isinstance(arg, fx.Node))
        return here

    def _uses_by(self, node: fx.Node, user: fx.Node, there: int) -> int:
        """Returns the uses that `node` gets from its reader `user`. there: uses of the result of `user`."""
        if user in self._layers:
            return LAYER
        traits = self._traits[user]
        if traits & MATMUL and user not in self._feeds.products.no_layer:
            kind = tags_of(user)[0].kind
            if kind is not Kind.CONVOLUTION:
                return self._into_product(user, kind, there)
        if self._feeds.kind.get(user) is Source.SCAN and there & (LAYER | MIXED):
            return MIXED
        if user in self._streams.joins:
            passed = there & self._passing_marks(user)
            if node is not self._streams.joins[user]:
                return passed
            return passed | self._shifts(node, user, there) | BRANCH
        if user in self._streams.skips:
            there = there & self._passing_marks(user) | (STARTS if self._starts_stream(user) else 0)
        if traits & CONVOLUTION and not is_depthwise(user):
            return CONVOLVED
        if traits & SELECTION:
            there |= SELECTS | (CHOOSES if there & (ONWARD | CHOOSES) else 0)
        value = tensor(node)
        if value is not None and not value.is_floating_point():
            return there & _OF_INDICES
        if traits & (FACTOR | SUM):
            there |= self._shifts(node, user, there)
        return there if traits & LINEAR else there & ~_ALONG_LINEAR

    def _into_product(self, user: fx.Node, kind: Kind, there: int) -> int:
        if kind is Kind.ATTENTION or user in self._feeds.products.attentions:
            return 0
        if user in self._feeds.products.soft:
            return 0 if there & LAYER else there
        if kind is not Kind.PRODUCT:
            return LAYER
        if self._feeds.kind.get(user) not in MIXERS:  # multiplies by a constant, or dispatches tokens
            return there
        if there & (SCORES | QKV) or not there & (LAYER | MIXED):
            return there
        return MIXED

    def _passing_marks(self, node: fx.Node) -> int:
        """Returns the marks of uses that also hold for the inputs of `node`, a residual sum or its skip."""
        return _PAST_SUMS | RESULT if self._feeds.number[node] in self._endings else _PAST_SUMS

    def _starts_stream(self, skip: fx.Node) -> bool:
        """Whether a stream starts with `skip`: its sources include no other stream."""
        if self._feeds.number[skip] in self._endings:
            return False
        origins = self._feeds.before[skip]
        return not any(self._feeds.kind[source] is Source.STREAM for source in origins if source is not skip)

    def _shifts(self, node: fx.Node, user: fx.Node, there: int) -> int:
        """Returns marks for `node` if the elementwise operator `user` combines it with a residual stream."""
        others = [arg for arg in user.args if isinstance(arg, fx.Node) and arg is not node]
        marks = 0
        for other in others:
            beyond = self._feeds.streams.get(other)
            if beyond and there & ONWARD and not beyond <= self._feeds.streams[node]:
                marks |= SHIFTS
            if packet(user) is aten.mul:
                apart = self._feeds.of_value[other].keys().isdisjoint(self._feeds.of_value[node])
                if beyond and apart and _size(other) > _size(node):  # a norm's factor is not `apart`
                    marks |= SCALES
                if other in self._feeds.chosen:
                    marks |= WEIGHED
        return marks


def _endings(feeds: Feeds, streams: Streams) -> frozenset[int]:
    """Returns the numbers of the streams at the end of a model, behind other streams.

    Only convolutions and layers without a nonlinearity in front of them read these streams or add to them.
    """
    behind = {feeds.number[node] for node in streams.skips if len(feeds.streams[node]) > 1}
    steps: set[tuple[fx.Node, int]] = set()
    for node in streams.joins:
        number = feeds.number[node]
        for source, marks in feeds.before[node].items():
            if feeds.kind[source] is Source.LAYER and not marks & BENT and _reads(source, feeds) == [number]:
                steps.add((source, number))
            elif feeds.kind[source] not in (Source.STREAM, Source.CONVOLUTION):
                behind.discard(number)
    for layer in feeds.layers:
        origins = feeds.of_value.get(data_operand(layer), {})
        behind -= {n for n in map(feeds.number.get, origins) if n is not None and (layer, n) not in steps}
    for operand in feeds.products.read:
        behind -= {feeds.number[source] for source in feeds.sources(feeds.of_value[operand], Source.STREAM)}
    return frozenset(behind)


def _reads(layer: fx.Node, feeds: Feeds) -> list[int | None]:
    """Returns the number of the stream that `layer` reads directly; [] if its input has other sources."""
    origins = feeds.of_value.get(data_operand(layer), {})
    if len(origins) != 1 or any(marks & BENT for marks in origins.values()):
        return []
    return [feeds.number.get(source) for source in origins]


def _size(node: fx.Node) -> int:
    value = tensor(node)
    return 1 if value is None else numel(value.shape)
