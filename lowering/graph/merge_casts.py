"""merge_casts: one cast of all that is made of a tensor in one format, and one search for its amax.

    cast(x, [codes @−1]), cast(x, [codes @−2])      →  cast(x, [both])             one read of x
    cast(x, [values @−1]), cast(x, [codes @−2])     →  cast(x, [both])
    cast(x, [packed @−1]), cast(x, [packed @−2])    →  cast(x, [both])
    largest(x), hadamard_largest(x)[1]              →  hadamard_largest(x)[0], hadamard_largest(x)[1]

For chips whose casts are templates, which make copies in MXFP8 and packed FP4; where a cast is a loop that
fuses with its neighbours two are as good. Values are what a product multiplies on chips without an MX GEMM;
those of squares are the same both ways and stay alone. Copies of random elements stay apart, because their
random numbers take the registers of the second copy. So do two copies if one needs an amax that is computed
behind the other. Runs after `expand`. Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.lowering import optional
from mxcompile.lowering.graph.lowering_pass import COLLECTED, NATIVE, NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.templates.configs import is_one_matrix
from mxcompile.ops.view import Cast, results_of

_Group = dict[int, Cast]
"""Casts of one tensor in one format, by their sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeCasts(LoweringPass):
    """For GPUs that multiply MXFP8 or emulate it; those that multiply packed FP4 are among them."""

    name: ClassVar[str] = "merge_casts"

    @property
    def applies(self) -> bool:
        """Where casts to MXFP8 have templates."""
        return self.target.native or self.target.emulates

    @property
    def obstacle(self) -> str:
        """Why there are no templates of those casts."""
        return optional.obstacle(*(COLLECTED if self.target.emulates else NATIVE))

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the casts of `graph`, each where the first of its tensor was."""
        build = Builder(graph, self.name)
        for node in list(graph.find_nodes(op="call_function", target=ops.hadamard_largest)):
            _share_amax(build, node)
        groups: dict[Any, list[_Group]] = {}
        for node in graph.find_nodes(op="call_function", target=ops.cast):
            cast = Cast.of(node)
            if cast is None or not self._takes(cast):
                continue
            alone = cast.node if cast.form.stochastic else None
            waiting = groups.setdefault((cast.x, cast.form.untransformed, cast.copy.layout, alone), [])
            group = next((group for group in waiting if _fits(group, cast)), None)
            if group is None:
                waiting.append(group := {})
            group[cast.side] = cast
        for waiting in groups.values():
            for group in waiting:
                if len(group) > 1:
                    _merge(build, group)
        dead.eliminate(graph)
        return NO_REASONS

    def _takes(self, cast: Cast) -> bool:
        """Whether a template makes the copy of `cast` together with another."""
        copy, value = cast.copy, tensor(cast.x)
        if copy.format.packed:
            return True
        if value is None or value.ndim < 2 or not copy.is_mx or copy.is_square or copy.dim not in (-1, -2):
            return False
        if not self.target.emulates:
            return copy.dtype is None
        if value.device.type != self.device or copy.is_tiled or not cast.node.users:
            return False
        return value.dtype.is_floating_point and is_one_matrix(value.shape, copy.dim)


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


def _fits(group: _Group, cast: Cast) -> bool:
    """Whether `cast` may join: along the other dimension, values in the same dtype, what it reads there."""
    dtypes = {each.copy.dtype for each in (*group.values(), cast)} - {None}
    first = min(each.node for each in group.values())
    ready = all(node < first for node in cast.node.all_input_nodes)
    return ready and cast.side not in group and len(dtypes) <= 1


def _merge(build: Builder, group: _Group) -> None:
    casts = [group[side] for side in (-1, -2)]
    first, amaxes = min(cast.node for cast in casts), [cast.amax for cast in casts]
    known = (None, 0, None, amaxes) if any(amaxes) else ()
    copies = [word for cast in casts for word in cast.copies]
    with build.graph.inserting_before(first):
        results = build.results(build.call(ops.cast, casts[0].x, copies, *known, like=first))
    for cast in casts:
        count = len(cast.node.meta["val"])
        build.replace_results(cast.node, results[:count])
        results = results[count:]
