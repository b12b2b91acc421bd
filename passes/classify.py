"""classify: give every GEMM its role, from the structure of the graph.

    qkv         reaches the q, k or v of an attention through nothing but linear operations
    attn_out    is fed by an attention
    ffn_in/out  a pair with an activation or a gate in between, ending in a residual add or in the width
                it started from; expert_* where the tokens were routed or the weight is a stack
    router      reaches a top-k whose result is used
    head        reaches the model's outputs, or shares its weight with an embedding
    embedding   is fed by a raw input and starts the residual stream
    attn_*      a product into a softmax, and the product of its result

What none of this fits is ``other``. Module and parameter names play no part. One sweep forward collects
what feeds each value, one backward where it goes; both are linear in the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from mxcompile.graph.names import GraphInput
from mxcompile.graph.opsets import (
    ACTIVATIONS,
    GATHERS,
    LINEAR_OPS,
    MAXIMA,
    SOFTMAX,
    STREAM_SOURCES,
    SUMS,
    TOP_K,
    aten,
    is_matmul_like,
    packet,
)
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, set_tag, tag_of, tags_of, tensor
from mxcompile.passes.flow import Depends, dependencies, origin
from mxcompile.policy import Role

_STREAM = "stream"
_INPUT = "input"

_EXPERT = {Role.FFN_IN: Role.EXPERT_IN, Role.FFN_OUT: Role.EXPERT_OUT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeds:
    """What a value was made from since the last matmuls.

    roots: the forward matmuls, "stream" for the residual stream, "input" for raw floating-point input.
    activated: an activation or a gate lies in between. softmaxed: a softmax does. routed: chosen by the
    indices of a top-k. topk: computed from a top-k in any way. starts: all layers fed by raw input that
    this was computed from, however far back.
    """

    roots: frozenset[Any] = frozenset()
    starts: frozenset[fx.Node] = frozenset()
    activated: bool = False
    softmaxed: bool = False
    routed: bool = False
    topk: bool = False

    @property
    def matmuls(self) -> frozenset[fx.Node]:
        """The roots that are matmuls."""
        return frozenset(root for root in self.roots if isinstance(root, fx.Node))

    @property
    def is_stream(self) -> bool:
        """Whether this is the residual stream itself, or a raw input that can be one."""
        return bool(self.roots) and self.roots <= {_STREAM, _INPUT}


_NOTHING = Feeds()


@dataclass(kw_only=True, slots=True)
class Goes:
    """Where a value goes before the next matmul: by linear operations only, or by any."""

    attention: bool = False  # linear
    residual: bool = False  # linear
    topk: bool = False
    routes: bool = False  # through a top-k, to a matmul
    output: bool = False
    matmul: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Classify:
    """Options: `inputs`, those of the captured graph."""

    name: ClassVar[str] = "classify"
    inputs: tuple[GraphInput, ...] = ()

    def apply(self, graph: fx.Graph) -> None:
        """Set the role in every tag of `graph`."""
        structure = _Structure(dependencies(graph, self.inputs))
        roles = {node.name: role for node, role in structure.roles().items()}
        for node in graph.nodes:
            tags = tags_of(node)
            if tags and tags[0].kind in (Kind.LINEAR, Kind.PRODUCT):
                set_tag(node, *(replace(tag, role=roles.get(tag.layer, Role.OTHER)) for tag in tags))


class _Structure:
    """The forward of a graph, with what feeds and what follows every value."""

    def __init__(self, depends: dict[fx.Node, Depends]) -> None:
        self._nodes = [n for n, flags in depends.items() if Depends.GRADIENT not in flags]
        self._products: dict[fx.Node, Role] = {}
        self._attention_operands: set[fx.Node] = set()
        self._residual_adds: set[fx.Node] = set()
        self._stream_starts: set[fx.Node] = set()
        self._feeds: dict[fx.Node, Feeds] = {}
        for node in self._nodes:
            self._feeds[node] = self._feeds_of(node, depends[node])
        self._goes = self._sweep_back()

    # -- forward ---------------------------------------------------------------------------------

    def _feeds_of(self, node: fx.Node, depends: Depends) -> Feeds:
        what = packet(node)
        if node.op == "placeholder":
            value = tensor(node)
            raw = value is not None and value.is_floating_point() and Depends.DATA in depends
            return Feeds(roots=frozenset({_INPUT})) if raw else _NOTHING
        arguments = [self._feeds[arg] for arg in node.all_input_nodes if arg in self._feeds]
        merged = _merge(arguments)
        if tags_of(node) and tags_of(node)[0].kind is not Kind.CONVOLUTION:
            self._visit_matmul(node)
            raw = tags_of(node)[0].kind is Kind.LINEAR and merged.roots == {_INPUT}
            return Feeds(roots=frozenset({node}), starts=merged.starts | ({node} if raw else frozenset()))
        if what in STREAM_SOURCES:
            return Feeds(roots=frozenset({_STREAM}), starts=merged.starts)
        if what in SUMS and self._joins_stream(arguments):
            self._residual_adds.add(node)
            return Feeds(roots=frozenset({_STREAM}), starts=merged.starts)
        if what in TOP_K:
            return replace(merged, topk=True)
        return replace(
            merged,
            activated=merged.activated or self._activates(node, what, merged),
            softmaxed=merged.softmaxed or _is_softmax(node, what),
            routed=merged.routed or (what in GATHERS and self._index_is_routed(node)),
        )

    def _joins_stream(self, arguments: list[Feeds]) -> bool:
        """Whether a sum of `arguments` continues the residual stream: the stream plus a branch.

        A branch ends in a layer or an attention; a product alone may be scores getting a learned bias. A
        layer that projects raw input starts a stream when its result is added to what was made from it.
        """
        for feeds in arguments:
            start = next(iter(feeds.roots)) if len(feeds.roots) == 1 else None
            if start in feeds.starts and not feeds.activated:
                others = [other for other in arguments if other is not feeds]
                if any(start in other.starts and start not in other.roots for other in others):
                    self._stream_starts.add(start)
                    return True
        return any(feeds.is_stream for feeds in arguments) and any(
            self._products.get(root) is Role.ATTN_VALUES or tags_of(root)[0].kind is not Kind.PRODUCT
            for feeds in arguments
            for root in feeds.matmuls
        )

    def _visit_matmul(self, node: fx.Node) -> None:
        """Recognise an attention product, and remember what its operands are."""
        if tags_of(node)[0].kind is Kind.ATTENTION:
            self._attention_operands.update(arg for arg in node.args[:3] if isinstance(arg, fx.Node))
            return
        if tags_of(node)[0].kind is not Kind.PRODUCT:
            return
        pair = [arg for arg in operands(node) if isinstance(arg, fx.Node)]
        weights = [arg for arg in pair if self._feeds[arg].softmaxed]
        if not weights:
            return
        self._products[node] = Role.ATTN_VALUES
        self._attention_operands.update(arg for arg in pair if arg not in weights)
        for root in self._feeds[weights[0]].matmuls:
            tag = tag_of(root)
            if tag is not None and tag.kind is Kind.PRODUCT:
                self._products[root] = Role.ATTN_SCORES
                self._attention_operands.update(arg for arg in operands(root) if isinstance(arg, fx.Node))

    def _activates(self, node: fx.Node, what: Any, merged: Feeds) -> bool:
        if not merged.matmuls:
            return False
        return what in ACTIVATIONS or (what is aten.mul and self._is_gate(node))

    def _is_gate(self, node: fx.Node) -> bool:
        """Whether `node` multiplies two matmul results elementwise, neither being a mere factor."""
        both = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if len(both) != 2 or both[0] is both[1]:
            return False
        if not all(self._feeds[arg].matmuls for arg in both):
            return False
        shapes = [value.shape for arg in both if (value := tensor(arg)) is not None]
        return len(shapes) == 2 and all(shape and shape[-1] != 1 for shape in shapes)

    def _index_is_routed(self, node: fx.Node) -> bool:
        return any(self._feeds[arg].topk for arg in node.all_input_nodes[1:] if arg in self._feeds)

    # -- backward --------------------------------------------------------------------------------

    def _sweep_back(self) -> dict[fx.Node, Goes]:
        goes = {node: Goes() for node in self._nodes}
        inside = set(self._nodes)
        for node in reversed(self._nodes):
            here = goes[node]
            here.attention |= node in self._attention_operands
            for user in node.users:
                if user.op == "output":
                    here.output = True
                elif user not in inside:
                    continue
                elif is_matmul_like(user) and packet(user) not in STREAM_SOURCES:
                    here.matmul = True
                else:
                    self._pass_back(here, goes[user], user)
        return goes

    def _pass_back(self, here: Goes, there: Goes, user: fx.Node) -> None:
        here.topk |= there.topk or packet(user) in TOP_K
        here.routes |= there.routes or (packet(user) in TOP_K and there.matmul)
        here.output |= there.output
        here.matmul |= there.matmul
        if packet(user) in LINEAR_OPS:
            here.attention |= there.attention
            here.residual |= there.residual or user in self._residual_adds

    # -- roles -----------------------------------------------------------------------------------

    def roles(self) -> dict[fx.Node, Role]:
        """The role of every forward matmul that has one."""
        roles = dict(self._products)
        layers = [(n, t) for n in self._nodes if (t := tag_of(n)) and t.kind is Kind.LINEAR]
        pairs = {node: self._pair(node, tag) for node, tag in layers}
        starts = {first for firsts in pairs.values() for first in firsts}
        for node, tag in layers:
            roles[node] = self._role(node, tag, bool(pairs[node]), node in starts)
        for node, tag in layers:  # a gate on an attention's result belongs to the attention
            if roles[node] is Role.ATTN_OUT:
                for root in self._data(node, tag).matmuls:
                    if roles.get(root) is Role.OTHER:
                        roles[root] = Role.QKV
        for node, _ in reversed(layers):  # a chain without an activation is one layer in two steps
            for first in self._chain(node):
                if roles[first] is Role.OTHER and roles[node] is not Role.HEAD:
                    roles[first] = roles[node]
        for node, _ in layers:
            partners = pairs[node] | {last for last, firsts in pairs.items() if node in firsts}
            if any(self._is_expert(n) for n in (node, *partners)):
                roles[node] = _EXPERT.get(roles[node], roles[node])
        return roles

    def _role(self, node: fx.Node, tag: GemmTag, ends_pair: bool, starts_pair: bool) -> Role:
        goes, feeds = self._goes[node], self._data(node, tag)
        if self._is_tied(node, tag):
            return Role.HEAD
        if goes.routes or (goes.topk and tag.n <= tag.k):  # more classes than width: a vocabulary
            return Role.ROUTER
        if goes.attention:
            return Role.QKV
        if self._from_attention(feeds):
            return Role.ATTN_OUT
        if ends_pair:
            return Role.FFN_OUT
        if starts_pair:
            return Role.FFN_IN
        if node in self._stream_starts:
            return Role.EMBEDDING
        if goes.output and not goes.residual and feeds.roots != {_INPUT}:
            return Role.HEAD
        return Role.OTHER

    def _data(self, node: fx.Node, tag: GemmTag) -> Feeds:
        """What feeds a layer, seen through layers in front of it that only change the width."""
        feeds = self._feeds[operands(node)[1 - tag.tensors.index("w")]]
        for _ in range(4):
            if feeds.activated or feeds.softmaxed or not self._all_layers(feeds):
                return feeds
            inner = [self._feeds[_data_operand(root)] for root in feeds.matmuls]
            feeds = _merge(inner)
        return feeds

    def _chain(self, node: fx.Node) -> frozenset[fx.Node]:
        """The layers that `node` is fed by with nothing but linear operations in between."""
        feeds = self._feeds[_data_operand(node)]
        linear = not feeds.activated and self._all_layers(feeds)
        return feeds.matmuls if linear else frozenset()

    def _pair(self, node: fx.Node, tag: GemmTag) -> frozenset[fx.Node]:
        """The layers that form a feed-forward network with `node` as its last, or none."""
        feeds = self._data(node, tag)
        if not feeds.activated or not self._all_layers(feeds):
            return frozenset()
        widths = {first.k for root in feeds.matmuls if (first := tag_of(root)) is not None}
        ends = self._goes[node].residual or self._goes[node].attention or widths == {tag.n}
        return feeds.matmuls if ends else frozenset()

    def _all_layers(self, feeds: Feeds) -> bool:
        """Whether `feeds` are linear layers and nothing else, none of them the start of a stream."""
        return bool(feeds.roots) and all(
            isinstance(root, fx.Node)
            and tags_of(root)[0].kind is Kind.LINEAR
            and root not in self._stream_starts
            for root in feeds.roots
        )

    def _from_attention(self, feeds: Feeds) -> bool:
        if _STREAM in feeds.roots or feeds.roots & self._stream_starts:
            return False
        return any(
            tags_of(root)[0].kind is Kind.ATTENTION or self._products.get(root) is Role.ATTN_VALUES
            for root in feeds.matmuls
        )

    def _is_tied(self, node: fx.Node, tag: GemmTag) -> bool:
        """Whether the weight is also a table of embeddings."""
        weight = origin(operands(node)[tag.tensors.index("w")])
        return any(packet(user) is aten.embedding and user.args[0] is weight for user in weight.users)

    def _is_expert(self, node: fx.Node) -> bool:
        tag = tag_of(node)
        if tag is None:
            return False
        weight = tensor(origin(operands(node)[tag.tensors.index("w")]))
        stacked = weight is not None and weight.ndim > 2
        return stacked or self._feeds[_data_operand(node)].routed


def _merge(feeds: Iterable[Feeds]) -> Feeds:
    merged = _NOTHING
    for other in feeds:
        if merged is _NOTHING:
            merged = other
        elif other is not _NOTHING:
            merged = Feeds(
                roots=merged.roots | other.roots,
                activated=merged.activated or other.activated,
                softmaxed=merged.softmaxed or other.softmaxed,
                routed=merged.routed or other.routed,
                topk=merged.topk or other.topk,
                starts=merged.starts | other.starts,
            )
    return merged


def _is_softmax(node: fx.Node, what: Any) -> bool:
    """A softmax, or the exponential of a decomposed one: exp(x − max x)."""
    if what in SOFTMAX:
        return True
    if what is not aten.exp or not isinstance(node.args[0], fx.Node):
        return False
    shifted = origin(node.args[0])
    if packet(shifted) is not aten.sub or not isinstance(shifted.args[1], fx.Node):
        return False
    subtracted = origin(shifted.args[1])
    if packet(subtracted) is aten.where:  # rows that are masked out altogether
        return any(packet(origin(arg)) in MAXIMA for arg in subtracted.all_input_nodes)
    source = subtracted.args[0] if packet(subtracted) is operator.getitem else subtracted
    return isinstance(source, fx.Node) and packet(source) in MAXIMA


def _data_operand(node: fx.Node) -> fx.Node:
    tag = tag_of(node)
    assert tag is not None
    operand = operands(node)[1 - tag.tensors.index("w")]
    assert isinstance(operand, fx.Node)
    return operand
