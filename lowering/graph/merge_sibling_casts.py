"""merge_sibling_casts: merge the dual-layout casts of two tensors that have the same inputs.

    cast(f(g, u, v), copies), cast(h(g, u, v), copies)  →  cast(f(…), copies, y=h(…))     g, u, v read once

An example is the backward of a gated activation: the gradients of both factors are computed from the
product's gradient, the gate and the other factor. f and h are elementwise, and only the casts read their
results. So the prologue of the merged cast computes both; with two kernels, one result would be stored. The
prologue reads at most three tensors of the results' size. Applies to chips whose casts have a template, after
`merge_casts`. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import TRANSPARENT, argument, packet
from mxcompile.graph.tags import hint, tensor, value_of
from mxcompile.lowering.choices import packing
from mxcompile.lowering.choices.epilogue import is_pointwise
from mxcompile.lowering.graph.lowering_pass import CASTS, LoweringPass
from mxcompile.ops.view import Casts

_MOST_LEAVES, _SHARED_LEAVES = 3, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _ComputedCast:
    """A cast and the computation of its source. chain: elementwise nodes, in order. leaves: their inputs.

    large: leaves with at least as many elements as the source.
    """

    cast: fx.Node
    chain: list[fx.Node]
    leaves: set[fx.Node]
    large: set[fx.Node]


class MergeSiblingCasts(LoweringPass):
    """Merges the casts of two tensors, on GPUs with a template for it."""

    templates = CASTS

    @property
    def applies(self) -> bool:
        """Whether casts are emulated, or the chip converts pairs of BF16 elements."""
        return self.target.emulates or (self.target.native and packing.converts(self.target))

    def apply(self, graph: fx.Graph) -> None:
        """Merges pairs of casts in `graph`, each at its first cast."""
        build = Builder(graph, self.name)
        waiting: list[_ComputedCast] = []
        for node in list(graph.nodes):
            candidate = _computed_cast(node)
            if candidate is None:
                continue
            other = next((cast for cast in waiting if _fit(cast, candidate)), None)
            if other is None:
                waiting.append(candidate)
            else:
                waiting.remove(other)
                _merge(build, other, candidate)


def _computed_cast(cast: fx.Node) -> _ComputedCast | None:
    """Returns `cast` and its computation if it makes two MXFP8 copies of an elementwise result, else None."""
    view = Casts.from_node(cast)
    if view is None or view.y is not None or len(view.copies) != 2 or not all(c.is_mx for c in view.parsed):
        return None
    source = view.x
    value = tensor(source)
    if value is None or value.ndim != 2 or value.dtype is not torch.bfloat16:
        return None
    chain: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    pending = [source]
    while pending:
        node = pending.pop()
        # The source itself must have no other reader, or it is stored anyway. Nodes before it are cheap to
        # compute again.
        is_elementwise = is_pointwise(node) or packet(node) in TRANSPARENT
        if is_elementwise and (node is not source or set(node.users) == {cast}):
            chain.add(node)
            pending += [arg for arg in node.all_input_nodes if arg not in chain]
        else:
            leaves.add(node)
    size = hint(value.numel())
    sizes = {leaf: tensor(leaf) for leaf in leaves}
    large = {leaf for leaf, its in sizes.items() if its is None or hint(its.numel()) >= size}
    return _ComputedCast(cast=cast, chain=sorted(chain), leaves=leaves, large=large)


def _fit(first: _ComputedCast, second: _ComputedCast) -> bool:
    """Whether both casts have equal copies and sizes, share leaves, and the second can move to the first."""
    shapes = (value_of(argument(cast.cast)).shape for cast in (first, second))
    same = statically_known_true(sym_eq(*shapes))  # no guard on sizes that depend on data
    same_copies = Casts.read(first.cast).copies == Casts.read(second.cast).copies
    few = len(first.large | second.large) <= _MOST_LEAVES
    shared = len(first.large & second.large) >= _SHARED_LEAVES
    ready = all(leaf < first.cast for leaf in second.leaves)
    return same and same_copies and few and shared and ready


def _merge(build: Builder, first: _ComputedCast, second: _ComputedCast) -> None:
    for node in second.chain:
        if not node < first.cast:
            first.cast.prepend(node)
    with build.graph.inserting_before(first.cast):
        arguments = Casts.read(first.cast).arguments(y=argument(second.cast))
        results = build.results(build.call(ops.cast, *arguments, like=first.cast))
    half = len(results) // 2
    build.replace_results(first.cast, results[:half])
    build.replace_results(second.cast, results[half:])
