"""pair: one operator where a rowwise and a columnwise cast of one tensor are made in the same graph.

    quantize(x, −1), quantize(x, −2)  →  quantize_both(x)                one read of x

For targets whose casts are kernels of their own; where a cast is a loop that fuses with its neighbours two
are as good (see `casts`). Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, NativePass, Reasons
from mxcompile.ops.view import Cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair(NativePass):
    """For chips with an MX GEMM."""

    name: ClassVar[str] = "pair"

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the pairs of `graph`, each where its first cast was."""
        build = Builder(graph, self.name)
        waiting: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            key = _key(node)
            if key is None:
                continue
            side, *how = key
            other = waiting.pop((-3 - side, *how), None)
            if other is None:
                waiting[key] = node
            else:
                _merge(build, first=other, second=node)
        return NO_REASONS


def _key(node: fx.Node) -> tuple[Any, ...] | None:
    """Direction, source, format and scale layout of a cast of a matrix; None for any other node."""
    cast = Cast.of(node) if node.target is ops.quantize else None
    value = None if cast is None else tensor(cast.x)
    if cast is None or value is None or value.ndim < 2 or cast.square:
        return None
    return cast.side, cast.x, cast.elem_dtype, cast.rounding, str(cast.scale_layout)


def _merge(build: Builder, *, first: fx.Node, second: fx.Node) -> None:
    cast = Cast.read(first)
    rowwise, columnwise = (first, second) if cast.side == -1 else (second, first)
    how = cast.x, cast.elem_dtype, cast.rounding, str(cast.scale_layout)
    with build.graph.inserting_before(first):
        both = build.call(ops.quantize_both, *how, like=first)
        results = build.results(both)
    build.replace_results(rowwise, results[:2])
    build.replace_results(columnwise, results[2:])
