"""tile_scales: casts write tiled scales, if only the target's MX GEMM reads them.

    cast(x, codes) → qdata, scale[rows, blocks]        →      cast(x, codes 128x4) → qdata, scale[length]
    matmul(…, transposed scale, …)                     →      matmul(…, scale, …)

Tiled scales are addressed by row and block along K, also if the elements are read transposed, so they have no
transpose; 4 blocks of a row are one 32-bit word. The pass runs on the joint graph, because forward may make a
copy that backward reads. A cast stays as it is if a reader is not a product of matrices on the target's MX
GEMM, if its tiles are square, or if it is empty. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mxcompile import ops
from mxcompile.formats import ScaleLayout
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import is_empty, tensor
from mxcompile.graph.transpose import readers
from mxcompile.lowering.graph.lowering_pass import NativePass
from mxcompile.lowering.graph.native import unmet
from mxcompile.ops.view import Cast, Product, results_of


class TileScales(NativePass):
    """Makes casts write tiled scales, on chips whose MX GEMM reads tiled scales."""

    @property
    def applies(self) -> bool:
        """Whether the MX GEMM reads tiled scales fastest."""
        return self.target.scale_layout is ScaleLayout.TILED_128X4

    def apply(self, graph: fx.Graph) -> None:
        """Changes the casts of `graph` whose scales only products on the target's MX GEMM read."""
        build = Builder(graph, self.name)
        for cast in Cast.calls(graph):
            uses = [use for index, result in results_of(cast.node) if index == 1 for use in readers(result)]
            if uses and _can_tile(cast) and all(_takes_tiles(*use, self.device) for use in uses):
                _tile(build, cast, uses)


def _can_tile(cast: Cast) -> bool:
    """Whether `cast` casts a nonempty matrix, with row-major scales of blocks along rows or columns."""
    value, copy = tensor(cast.x), cast.copy
    plain = copy.is_mx and copy.layout is ScaleLayout.ROW_MAJOR
    return plain and value is not None and value.ndim == 2 and not is_empty(value.shape)


def _takes_tiles(user: fx.Node, scale: fx.Node, device: str) -> bool:
    """Whether `user` is a product of matrices on the MX GEMM, and `scale` a scale of its operands."""
    out, product = tensor(user), Product.from_node(user) if user.target is ops.matmul else None
    if product is None or not product.is_mx or scale not in (product.scale_a, product.scale_b):
        return False
    return out is not None and out.ndim == 2 and not unmet(product, device)


def _tile(build: Builder, cast: Cast, uses: list[tuple[fx.Node, fx.Node]]) -> None:
    """Makes `cast` write tiled scales; readers of transposed scales read them too."""
    node, tiled = cast.node, replace(cast.copy, layout=ScaleLayout.TILED_128X4)
    with build.graph.inserting_before(node):
        new_node = build.call(ops.cast, *cast.arguments(copies=[str(tiled)]), like=node)
        results = build.results(new_node)
    new_node.meta = node.meta | new_node.meta
    for user, scale in uses:
        user.replace_input_with(scale, results[1])
    for index, old in list(results_of(node)):
        if index == 0:
            old.replace_all_uses_with(results[0])
