"""tile_scales: casts write scales in the tiles that the target's MX GEMM reads, if nothing else does.

    quantize(x, dim) → qdata, scale[rows, blocks]      →      quantize(x, dim, "128x4") → qdata, scale[length]
    scaled_mm(…, transposed scale, …)                  →      scaled_mm(…, scale, …)

A tiled scale says the same of rows and blocks along K whichever way its elements are read, so it has no
transpose, and 4 blocks of a row are one word. Runs on the joint graph: a copy that forward makes and
backward reads is seen from both ends. A cast stays as it is if one of its readers is not a product of
matrices that the target runs itself, if its scales are shared by squares, or if it is empty. Numerics do not
change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.formats import ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.graph.transpose import untransposed
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, NativePass, Reasons
from mxcompile.lowering.graph.native import Native


@dataclass(frozen=True, kw_only=True, slots=True)
class TileScales(NativePass):
    """For chips whose MX GEMM reads tiled scales."""

    name: ClassVar[str] = "tile_scales"

    @property
    def applies(self) -> bool:
        """Where tiles are what the MX GEMM reads fastest."""
        return self.target.scale_layout is ScaleLayout.TILED_128X4

    def apply(self, graph: fx.Graph) -> Reasons:
        """Change the casts of `graph` whose scales only the target's own products read."""
        build = Builder(graph, self.name)
        native = Native(target=self.target, device=self.device)
        for cast in graph.find_nodes(op="call_function", target=ops.quantize):
            uses = list(_uses(cast))
            if uses and _can_tile(cast) and all(_takes_tiles(native, *use) for use in uses):
                _tile(build, cast, uses)
        graph.eliminate_dead_code()
        return NO_REASONS


def _can_tile(cast: fx.Node) -> bool:
    """Whether `cast` is of a matrix that is not empty, its scales those of rows or columns, row-major."""
    value = tensor(cast.args[0])
    if value is None or value.ndim != 2 or any(cast.args[4:]):
        return False
    return all(not isinstance(size, int) or size > 0 for size in value.shape)


def _uses(cast: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads the scale of `cast`, and the node it reads it from: the scale or a transpose of it."""
    waiting = [result for result in cast.users if result.args[1] == 1]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if untransposed(user)[0] is untransposed(node)[0]:
                waiting.append(user)
            else:
                yield user, node


def _takes_tiles(native: Native, user: fx.Node, scale: fx.Node) -> bool:
    """Whether `user` is a product of matrices on the chip, and `scale` that of one of its operands."""
    out = tensor(user)
    reads_scale = user.target is ops.scaled_mm and scale in (user.args[1], user.args[3])
    return reads_scale and out is not None and out.ndim == 2 and native.runs(user)


def _tile(build: Builder, cast: fx.Node, uses: list[tuple[fx.Node, fx.Node]]) -> None:
    """Make the scale of `cast` a tiled one, also for those that read transposes of it."""
    arguments = (*cast.args[:4], False, str(ScaleLayout.TILED_128X4))
    with build.graph.inserting_before(cast):
        made = build.call(cast.target, *arguments, like=cast)
        results = [build.call(operator.getitem, made, index, like=cast) for index in range(2)]
    made.meta = {**cast.meta, **made.meta}
    for user, scale in uses:
        user.replace_input_with(scale, results[1])
    for old in cast.users:
        if old.args[1] == 0:
            old.replace_all_uses_with(results[0])
