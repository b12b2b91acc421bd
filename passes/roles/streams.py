"""Residual streams: sums of a value and of a result that layers compute from that value.

    s' = s + f(s)

The skip s may be scaled, dropped out or summed with other branches on its way. Every path through f has a
layer or a convolution, unlike sums inside a branch (a state-space model's D·x, a value added to its own
attention). A layer that mixes only the batch dimension of a product does not count: talking heads add such a
mix to the scores. A value that a branch reads from elsewhere (a position added in every layer, a condition)
is not a skip: once the branch has joined its stream, only the sources of the skip count. If a model predicts
a difference, it adds its input to the end of a stream; this sum is not a stream.

The sweep tracks only the skips that a value comes from, and each skip only up to its last sum. So the sets
stay small and the sweep linear.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from mxcompile.graph.opsets import RANDOM, TRANSPARENT, aten, packet
from mxcompile.graph.tags import Kind, tags_of, tensor
from mxcompile.ops.view import result_of
from mxcompile.passes.roles.axes import BATCH, axes, contracted, data_operand, product_behind
from mxcompile.passes.roles.flow import Depends, origin
from mxcompile.passes.roles.traits import CALL, CONVOLUTION, FACTOR, MATMUL, RANDOMS, SUM, VIEW

_LAYERS = frozenset({Kind.LINEAR, Kind.OPAQUE})
_FACTORS = frozenset({aten.mul, aten.div})
_DEPTH = 12
_NONE: frozenset[fx.Node] = frozenset()


class Streams:
    """The residual streams among `nodes`, the forward of a graph in order.

    joins: additions to a stream, and their argument with the branch. skips: values that a branch is added to.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], depends: dict[fx.Node, Depends], traits: dict[fx.Node, int]
    ) -> None:
        self._traits = traits
        self._mixes: set[fx.Node] = set()
        self._past_join: set[fx.Node] = set()
        self._depends = depends
        self._position = {node: index for index, node in enumerate(nodes)}
        self._forks = {node for node in nodes if sum(user in self._position for user in node.users) > 1}
        # the skips that a value contains, without a layer in between and behind a layer
        self._direct: dict[fx.Node, frozenset[fx.Node]] = {}
        self._worked: dict[fx.Node, frozenset[fx.Node]] = {}
        self.joins: dict[fx.Node, fx.Node] = {}
        self.skips: set[fx.Node] = set()
        self._bases: dict[fx.Node, tuple[list[fx.Node], list[fx.Node]]] = {}
        self._last: dict[fx.Node, int] = {}
        for index, node in enumerate(nodes):
            if traits[node] & SUM and len(node.args) > 1:
                lhs, rhs = (self._bases_of(arg) for arg in node.args[:2])
                self._bases[node] = lhs, rhs
                self._last.update(dict.fromkeys([*lhs, *rhs], index))
        self._sweep(nodes)

    def _bases_of(self, argument: Any) -> list[fx.Node]:
        """Returns the values that `argument` of a sum still contains and that other nodes read too."""
        bases: list[fx.Node] = []
        pending = [(argument, False, _DEPTH)]
        while pending:
            node, forked, depth = pending.pop()
            if not isinstance(node, fx.Node) or node not in self._position or not depth:
                continue
            forked = forked or node in self._forks
            if before := self._passed_arguments(node, forked):
                pending += [(arg, forked, depth - 1) for arg in before]
            elif forked:
                bases.append(node)
        return bases

    def _passed_arguments(self, node: fx.Node, forked: bool) -> list[Any]:
        """Returns the arguments that `node` passes on: through a view, a sum, or a product with a factor."""
        traits = self._traits[node]
        if traits & (VIEW | RANDOMS):
            return [node.args[0]] if node.args else []
        if node.target is operator.getitem:
            several, _ = result_of(node)
            return [several] if several is not None and packet(several) is aten.native_dropout else []
        if traits & FACTOR:
            # not numbers, parameters, and the mask of a dropout
            nodes = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
            values = [arg for arg in nodes if Depends.DATA in self._depends[arg] and not _is_mask(arg)]
            return values if len(values) == 1 else []
        if traits & SUM and not forked:
            return list(node.args[:2])
        return []

    def _sweep(self, nodes: Sequence[fx.Node]) -> None:
        direct, worked = self._direct, self._worked
        for index, node in enumerate(nodes):
            arguments, traits = node.all_input_nodes, self._traits[node]
            self._join(node)
            near = self._union(direct, arguments, index)
            far = self._union(worked, arguments, index)
            if node in self.joins:
                kept = [arg for arg in arguments if arg is not self.joins[node]]
                near = self._union(direct, kept, index)
                far &= near | self._union(worked, kept, index)
                self._past_join.add(node)
            elif traits & CALL and not self._past_join.isdisjoint(arguments):
                self._past_join.add(node)
            if near and far and packet(node) is aten.cat:  # a part of a value is not the value
                # but an argument may reach a skip by two paths: with a layer, and without one
                near -= far - _NONE.union(*(direct[arg] & worked[arg] for arg in arguments))
            is_layer = traits & MATMUL and tags_of(node)[0].kind in _LAYERS
            if (near or far) and (is_layer or traits & CONVOLUTION):
                near, far = _NONE, near | far
            if self._last.get(node, -1) > index:
                near |= {node}
            direct[node], worked[node] = near, far

    def _union(
        self, by_node: dict[fx.Node, frozenset[fx.Node]], arguments: list[fx.Node], index: int
    ) -> frozenset[fx.Node]:
        merged = _NONE
        for argument in arguments:
            other = by_node[argument]
            if other and other is not merged:
                merged = merged | other if merged else other
        if merged and any(self._last[base] < index for base in merged):
            merged = frozenset(base for base in merged if self._last[base] >= index)
        return merged

    def _join(self, node: fx.Node) -> None:
        """Records the sum `node` if it adds a branch to its skip."""
        for bases, branch in zip(self._bases.get(node, ()), reversed(node.args[:2]), strict=False):
            if not isinstance(branch, fx.Node) or branch not in self._worked:
                continue
            for base in bases:
                overall = base.op == "placeholder" and branch in self._past_join
                computed = base in self._worked[branch] and base not in self._direct[branch]
                if computed and not overall and not self._is_mix(base, branch):
                    self.joins[node] = branch
                    self.skips.add(base)

    def _is_mix(self, base: fx.Node, branch: fx.Node) -> bool:
        """Whether `branch` is a layer directly on `base`, the scores of an attention, and mixes the heads."""
        layer = origin(branch)
        tags = tags_of(layer)
        if not tags or tags[0].kind is not Kind.LINEAR:
            return False
        data = data_operand(layer)
        product = product_behind(data, self._mixes)
        if product is None or tags_of(product)[0].kind is not Kind.PRODUCT:
            return False
        if axes(data, contracted(layer), product, self._mixes) != BATCH:
            return False
        if product not in (base, product_behind(base, self._mixes)):
            return False
        self._mixes.add(layer)
        return True


def _is_mask(node: fx.Node) -> bool:
    """Whether `node` is the mask of a decomposed dropout: a comparison of random numbers, cast or not."""
    for _ in range(_DEPTH):
        value = tensor(node)
        if value is not None and not value.is_floating_point():
            return True
        if packet(node) not in TRANSPARENT and packet(node) not in _FACTORS:
            return packet(node) in RANDOM
        inner = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
        if len(inner) != 1:
            return False
        node = inner[0]
    return False
