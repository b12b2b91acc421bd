"""Source and arguments of one tile, which the templates of batched and grouped products share.

A template chooses the operands, the rows and the range of K of a program. `TILE` computes the tile with
`lowering.kernels.scaled_tile`, and `STORE` passes it to Inductor, which adds the epilogue. SWAP computes the
transposed tile, for few rows on a chip whose MMA needs many rows of A but few columns of B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate
from torch._inductor.virtualized import V

from mxcompile.lowering.chips.tiles import MatmulConfig
from mxcompile.lowering.choices.configs import products
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.coding import GAIN, Coding
from mxcompile.lowering.templates.examples import Make, dense

IMPORTS = r"""
from mxcompile.lowering.kernels import scaled_tile
from mxcompile.lowering.kernels.scaled_tile import tile_of
"""
"""Source: imports of the templates that use `TILE`."""

TILE = r"""
    stride_am = {{stride("A", -2)}}
    stride_ak = {{stride("A", -1)}}
    stride_sam = {{stride("SA", -2)}}
    stride_sak = {{stride("SA", -1)}}
    stride_bk = {{stride("B", -2)}}
    stride_bn = {{stride("B", -1)}}
    stride_sbk = {{stride("SB", -2)}}
    stride_sbn = {{stride("SB", -1)}}
    in_m = rm < end_m
    in_n = rn < N
{% if SWAP %}
    acc = scaled_tile.tile_product(
        b, sb, a, sa, rn.to(INDEX), rm.to(INDEX), in_n, in_m, begin, end, length,
        stride_bn, stride_bk, stride_sbn, stride_sbk, stride_ak, stride_am, stride_sak, stride_sam,
        ELEM_B, ELEM_A, BLOCK, BLOCK_K, WHOLE_K, SPAN)
    idx_m = rm[None, :].to(INDEX_DTYPE)
    idx_n = rn[:, None].to(INDEX_DTYPE)
    mask = in_m[None, :] & in_n[:, None]
{% else %}
    acc = scaled_tile.tile_product(
        a, sa, b, sb, rm.to(INDEX), rn.to(INDEX), in_m, in_n, begin, end, length,
        stride_am, stride_ak, stride_sam, stride_sak, stride_bk, stride_bn, stride_sbk, stride_sbn,
        ELEM_A, ELEM_B, BLOCK, BLOCK_K, WHOLE_K, SPAN)
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask = in_m[:, None] & in_n[None, :]
{% endif %}
""" + GAIN.replace("ACC", "acc")
"""Source after `coding.HEAD`: computes a tile. Reads pointers a, sa, b, sb; rm and rn, the tile's rows and
columns; end_m and N, their ends; begin and end, the range of K in elements; length, all bytes of K. Defines
acc (FP32), idx_m, idx_n and mask for `STORE`."""

STORE = r"""
    {{store_output(INDICES, "acc", "mask",
                   val_shape=("BLOCK_N", "BLOCK_M") if SWAP else ("BLOCK_M", "BLOCK_N"))}}
"""
"""Source: stores the tile. INDICES: name of an index for each dimension of the result."""


@SymbolicGridFn
def batch_grid(q: Any, m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:  # noqa: A002
    """Returns the grid of a product for each of `q` entries: a program per tile, or NUM_SMS programs."""
    tiles = q * cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"])
    return min(meta.get("NUM_SMS", tiles), tiles), 1, 1


@SymbolicGridFn
def rows_grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:  # noqa: A002
    """Returns the grid of groups of rows, or of columns: as many programs as in `batch_grid`."""
    if meta["COLUMNS"]:
        m, n = n, m
    tiles = (cdiv(m, meta["BLOCK_M"]) + meta["NUM_GROUPS"]) * cdiv(n, meta["BLOCK_N"])
    return min(meta.get("NUM_SMS", tiles), tiles), 1, 1


def select(
    template: TritonTemplate,
    operands: Sequence[Any],
    layout: ir.Layout,
    rows: Any,
    coding: Coding,
    examples: Mapping[int, Make] | None = None,
    *,
    span: bool = False,
    **keywords: Any,
) -> ir.TensorBox:
    """Returns the result, in `layout`, of `template` with the tile for products with `rows` rows.

    operands: a [.., M, K], its scale, b [.., K, N], its scale, then others. examples: makers of operands for
    autotuning, if it needs more than codes and scales. span: whether a product may have any part of K.
    keywords: arguments of this template alone.
    """
    sizes, depth = V.graph.sizevars, operands[0].get_size()[-1]
    tried = (
        (
            template,
            {
                **blocks(tile, swap=swap),
                "WHOLE_K": sizes.statically_known_multiple_of(depth, tile.block_k) and not span,
                "INDEX": index_type(*map(_extent, operands[:4])),
                **coding.arguments,
                "SPAN": span,
                **keywords,
            },
        )
        for swap, tile in products(of_device(layout.device), sizes.optimization_hint(rows))
    )
    inputs = examples or dense(coding)
    at_once = examples is not None
    return call.best(template.name, operands, layout, tried, examples=inputs, at_once=at_once)


def blocks(tile: MatmulConfig, *, swap: bool, **more: Any) -> dict[str, Any]:
    """Returns the arguments for the shape of a tile. If swapped, block_m counts columns and block_n rows."""
    return {
        "BLOCK_M": tile.block_n if swap else tile.block_m,
        "BLOCK_N": tile.block_m if swap else tile.block_n,
        "BLOCK_K": tile.block_k,
        **more,
        "SWAP": swap,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def index_type(*extents: Any) -> str:
    """Returns the type of offsets into tensors of `extents` elements, and into a tile past their ends."""
    is_less = V.graph.sizevars.statically_known_lt
    return "tl.int32" if all(is_less(extent, 2**31 - 2**21) for extent in extents) else "tl.int64"


def _extent(operand: Any) -> Any:
    """Returns a bound on the offsets of a tile of `operand`; a tile may reach past the matrix."""
    pairs = zip(operand.get_size()[-2:], operand.get_stride()[-2:], strict=True)
    return sum((size + _SPARE) * stride for size, stride in pairs)


_SPARE = 512  # most rows or columns by which a tile reaches past its matrix
