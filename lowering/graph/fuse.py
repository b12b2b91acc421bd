"""fuse: fuse a product with the cast of its left operand.

    matmul(cast(x), w)  →         quantize_mm(x, w)                      the FP8 copy of x is never stored

Applies to a matrix x that is cast rowwise, if only this product reads the cast: in inference, or in a forward
whose backward reads another copy. A cast stays if several products share it (QKV), if its tensor has another
cast (`merge_casts` joins both), or if the template has no tile that is faster. Under autotuning the operator
also takes the results of the cast, so that Inductor can time both forms; if the fused form wins, the cast is
dead code. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import hint, set_tag, tags_of, tensor, value_of
from mxcompile.lowering.choices.configs import Tiles, autotuning, fused
from mxcompile.lowering.graph.lowering_pass import NativePass
from mxcompile.ops.view import Cast, Product, result_of


class Fuse(NativePass):
    """Fuses a product with the cast of its left operand, on chips with an MX GEMM."""

    templates = (*NativePass.templates, "templates.fused_quantize_mm")

    def apply(self, graph: fx.Graph) -> None:
        """Fuses the products of `graph` that the fused kernel makes faster, and names this kernel in tags."""
        build = Builder(graph, self.name)
        for node in list(graph.nodes):
            cast = cast_of(node)
            if cast is not None:
                tile_sizes = fused(self.target, *map(hint, value_of(node).shape))
                if tile_sizes:
                    self._fuse(build, Product.read(node), cast, tile_sizes)

    def _fuse(self, build: Builder, product: Product, cast: Cast, tile_sizes: Tiles) -> None:
        node, right = product.node, product.sides[1]
        competing = product.sides[0] if autotuning() else ()
        formats = product.out_dtype, cast.fmt, product.format_b
        with build.graph.inserting_before(node):
            fused = build.call(ops.quantize_mm, cast.x, *right, product.bias, *formats, *competing, like=node)
        kernel = f"mx_quantize_mm {_config(tile_sizes, bool(competing))} ({self.target.mma})"
        set_tag(fused, *(replace(tag, kernel=kernel) for tag in tags_of(node)))
        build.replace(node, fused)


def _config(tile_sizes: Tiles, competes: bool) -> str:
    """Returns the tile of the template; under autotuning the number of choices, one of them unfused."""
    if competes:
        return f"autotuned of {len(tile_sizes) + 1}"
    ((swap, tile),) = tile_sizes
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}{' swapped' if swap else ''}"


def cast_of(node: fx.Node) -> Cast | None:
    """Returns the cast of the left operand if `node`, a product of matrices, can fuse with it, else None."""
    product = Product.from_node(node) if node.target is ops.matmul else None
    if product is None or not product.is_mx or not all(tag.kernel for tag in tags_of(node)):
        return None
    bias, out, results = tensor(product.bias), tensor(node), product.sides[0]
    if out is None or out.ndim != 2 or (bias is not None and bias.ndim != 1):
        return None
    cast = Cast.from_node(result_of(results[0])[0])
    if cast is None or any(list(result.users) != [node] for result in results):
        return None
    alone = [result_of(result) for result in results] == [(cast.node, 0), (cast.node, 1)]
    alone = alone and len(cast.node.users) == 2
    shared = any(packet(user) in ops.CASTS and user is not cast.node for user in cast.x.users)
    rowwise = cast.side == -1 and cast.copy.is_mx and not cast.copy.is_square
    return cast if alone and rowwise and not shared and tensor(cast.x) is not None else None
