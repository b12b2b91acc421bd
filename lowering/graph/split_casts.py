"""split_casts: split a cast into scales and elements, so that a reader of one does not compute both.

    cast(x, codes)  →  cast(x, scales), cast(x, elements)

Applies to casts that loops make, of formats other than MXFP8. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.formats import CopyPart
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import value_of
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.casts import has_kernel
from mxcompile.lowering.graph.lowering_pass import LoweringPass
from mxcompile.ops.view import Cast, results_of


class SplitCasts(LoweringPass):
    """Splits a cast into a cast to elements and a cast to scales, on all targets."""

    def apply(self, graph: fx.Graph) -> None:
        """Splits the casts of `graph`; parts without a reader disappear."""
        build, cpp = Builder(graph, self.name), self.device == "cpu" and not kernel.obstacle()
        for cast in Cast.calls(graph):
            if cast.copy.is_mx or cast.form.packed or (cpp and has_kernel(cast.copy)):
                continue
            if len(cast.copy.specs(value_of(cast.x))) > 1:
                _split(build, cast)


def _split(build: Builder, cast: Cast) -> None:
    results = dict(results_of(cast.node))

    def part(name: CopyPart, **changes: Any) -> fx.Node:
        copies = [str(replace(cast.copy, part=name))]
        (result,) = build.results(
            build.call(ops.cast, *cast.arguments(copies=copies, **changes), like=cast.node)
        )
        return result

    with build.graph.inserting_before(cast.node):
        scale = cast.scale or part(CopyPart.SCALES, seed=None, stream=0)
        parts = {1: scale}
        if 0 in results and results[0].users:
            parts[0] = part(CopyPart.ELEMENTS, scales=[scale])
    for index, result in results.items():
        if index in parts:
            result.replace_all_uses_with(parts[index])
