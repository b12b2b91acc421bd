"""pair: one operator where a rowwise and a columnwise cast of one tensor are made in the same graph.

    quantize(x, −1), quantize(x, −2)  →  quantize_both(x)                one read of x

For targets whose casts are kernels of their own; where a cast is a loop that fuses with its neighbours two
are as good (see `casts`). Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.formats import ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, NativePass, Reasons

_OPTIONAL = (False, ScaleLayout.ROW_MAJOR)  # what a cast's last two arguments are where it has none


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
            source, side, *fmt = key
            other = waiting.pop((source, -3 - side, *fmt), None)
            if other is None:
                waiting[key] = node
            else:
                _merge(build, first=other, second=node)
        return NO_REASONS


def _key(node: fx.Node) -> tuple[Any, ...] | None:
    """Source, direction, format and scale layout of a cast of a matrix; None for any other node."""
    if node.op != "call_function" or node.target is not ops.quantize:
        return None
    source, dim, elem_dtype, rounding, square, scale_layout = (*node.args, *_OPTIONAL[len(node.args) - 4 :])  # type: ignore[misc]
    value = tensor(source)
    if value is None or value.ndim < 2 or square:
        return None
    side = int(dim) if dim < 0 else int(dim) - value.ndim  # type: ignore[operator, arg-type]
    return source, side, elem_dtype, rounding, str(scale_layout)


def _merge(build: Builder, *, first: fx.Node, second: fx.Node) -> None:
    rowwise, columnwise = (first, second) if _key(first)[1] == -1 else (second, first)  # type: ignore[index]
    source, _, *fmt = _key(first)  # type: ignore[misc]
    with build.graph.inserting_before(first):
        both = build.call(ops.quantize_both, source, *fmt, like=first)
        results = [build.call(operator.getitem, both, index, like=first) for index in range(4)]
    for cast, made in ((rowwise, results[:2]), (columnwise, results[2:])):
        for user in list(cast.users):
            build.replace(user, made[user.args[1]])  # type: ignore[index]
        build.graph.erase_node(cast)
