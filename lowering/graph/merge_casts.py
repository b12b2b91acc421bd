"""merge_casts: one cast of all that is made of a matrix in MXFP8.

    cast(x, [codes along −1]), cast(x, [codes along −2])   →  cast(x, [both])             one read of x
    cast(x, [values along −1]), cast(x, [codes along −2])  →  cast(x, [both])

For chips whose casts are templates; where a cast is a loop that fuses with its neighbours two are as good.
Values are what a product multiplies on chips without an MX GEMM; those of squares are the same both ways and
stay alone. Runs after `expand`. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.lowering import optional
from mxcompile.lowering.graph.lowering_pass import COLLECTED, NATIVE, NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.templates.configs import is_one_matrix
from mxcompile.ops.view import Cast

_Group = dict[int, Cast]
"""Casts of one tensor in one format, by their sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeCasts(LoweringPass):
    """For GPUs that multiply MXFP8 or emulate it."""

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
        groups: dict[Any, list[_Group]] = {}
        for node in graph.find_nodes(op="call_function", target=ops.cast):
            cast = Cast.of(node)
            if cast is None or not self._takes(cast):
                continue
            waiting = groups.setdefault((cast.x, cast.form, cast.copy.layout), [])
            group = next((group for group in waiting if _fits(group, cast)), None)
            if group is None:
                waiting.append(group := {})
            group[cast.side] = cast
        for waiting in groups.values():
            for group in waiting:
                if len(group) > 1:
                    _merge(build, group)
        return NO_REASONS

    def _takes(self, cast: Cast) -> bool:
        """Whether a template makes the copy of `cast` together with another."""
        copy, value = cast.copy, tensor(cast.x)
        if value is None or value.ndim < 2 or not copy.is_mx or copy.is_square or copy.dim not in (-1, -2):
            return False
        if not self.target.emulates:
            return copy.dtype is None
        if value.device.type != self.device or copy.is_tiled or not cast.node.users:
            return False
        return value.dtype.is_floating_point and is_one_matrix(value.shape, copy.dim)


def _fits(group: _Group, cast: Cast) -> bool:
    """Whether `cast` may join: along the other dimension, values in the same dtype."""
    dtypes = {each.copy.dtype for each in (*group.values(), cast)} - {None}
    return cast.side not in group and len(dtypes) <= 1


def _merge(build: Builder, group: _Group) -> None:
    casts = [group[side] for side in (-1, -2)]
    first = min(cast.node for cast in casts)
    copies = [word for cast in casts for word in cast.copies]
    with build.graph.inserting_before(first):
        results = build.results(build.call(ops.cast, casts[0].x, copies, like=first))
    for cast in casts:
        count = len(cast.node.meta["val"])
        build.replace_results(cast.node, results[:count])
        results = results[count:]
