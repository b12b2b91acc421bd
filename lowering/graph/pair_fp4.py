"""pair_fp4: one read of a tensor for both of its packed copies, and one for the amax of both.

    cast(x, packed @−1), cast(x, packed @−2)        →  cast(x, both)
    largest(x), hadamard_largest(x)[1]              →  hadamard_largest(x)[0], hadamard_largest(x)[1]

For chips with packed FP4 operands. Casts to random elements stay apart, because their random numbers take the
registers of the second copy. So do two copies if one needs an amax that is computed behind the other.
Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.packed import FP4_TEMPLATES
from mxcompile.ops.view import Cast, results_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFP4(LoweringPass):
    """For chips with products of packed FP4 operands."""

    name: ClassVar[str] = "pair_fp4"
    templates: ClassVar[tuple[str, ...]] = FP4_TEMPLATES

    @property
    def applies(self) -> bool:
        """Where casts write packed copies."""
        return bool(self.target.fp4_scales)

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the pairs of `graph`, each where its first node was."""
        build = Builder(graph, self.name)
        for node in list(graph.find_nodes(op="call_function", target=ops.hadamard_largest)):
            _share_amax(build, node)
        waiting: dict[Any, Cast] = {}
        for node in list(graph.find_nodes(op="call_function", target=ops.cast)):
            cast = Cast.of(node)
            if cast is None or not cast.form.packed:
                continue
            key = _key(cast)
            other = waiting.get(key)
            if other is None or other.side == cast.side or not _is_ready(cast, before=other):
                waiting[key] = cast
            else:
                _merge(build, first=waiting.pop(key), second=cast)
        dead.eliminate(graph)
        return NO_REASONS


def _share_amax(build: Builder, both: fx.Node) -> None:
    """Let `both` compute the amax of the tensor that `largest` computes."""
    source = both.args[0]
    assert isinstance(source, fx.Node)
    plain = next((user for user in source.users if user.target is ops.largest), None)
    if plain is None:
        return
    if plain < both:
        plain.prepend(both)
        for _, result in sorted(results_of(both)):
            both.append(result)
    with build.graph.inserting_after(both):
        first = build.call(operator.getitem, both, 0, like=plain)
    build.replace(plain, first)


def _key(cast: Cast) -> tuple[Any, ...]:
    """Source, format and scale layout, alike in both copies of a tensor; alone for random elements."""
    alone = cast.node if cast.form.stochastic else None
    return cast.x, cast.form.untransformed, cast.copy.layout, alone


def _is_ready(cast: Cast, *, before: Cast) -> bool:
    """Whether all that `cast` reads is there at `before`, and `cast` has a transform along columns alone."""
    is_placed = cast.form.hadamard is None or cast.side == -2
    return is_placed and all(node < before.node for node in cast.node.all_input_nodes)


def _merge(build: Builder, *, first: Cast, second: Cast) -> None:
    casts = sorted((first, second), key=lambda cast: cast.side, reverse=True)
    copies, amaxes = [str(cast.copy) for cast in casts], [cast.amax for cast in casts]
    known = (None, 0, None, amaxes) if any(amaxes) else ()
    with build.graph.inserting_before(first.node):
        both = build.call(ops.cast, first.x, copies, *known, like=first.node)
        results = build.results(both)
    for cast, outputs in zip(casts, (results[:2], results[2:]), strict=True):
        build.replace_results(cast.node, outputs)
