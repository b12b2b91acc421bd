"""Tiled scales (see `scale_tiles`) in Inductor's IR: their layout and the offset of a byte.

Casts without a template and decoding use this module; kernels use `kernels.tiles.swizzled_offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import view
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS


def tiled(scale: ir.TensorBox, block_dim: int) -> ir.TensorBox:
    """Returns tiled scale bytes from the row-major bytes of a matrix cast along `block_dim`."""
    rowwise = block_dim % 2 == 1
    rows, blocks = scale.get_size() if rowwise else reversed(scale.get_size())
    load = scale.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        down, across, low, high, column = index
        row, block = down * TILE_ROWS + high * 32 + low, across * TILE_BLOCKS + column
        inside = inductor.logical_and(less(row, rows), less(block, blocks))
        return inductor.masked(inside, lambda: load((row, block) if rowwise else (block, row)), 0)

    tiles = ir.Pointwise.create(
        device=scale.get_device_or_error(),
        dtype=torch.uint8,
        inner_fn=inner,
        ranges=[*_tiles(rows, blocks), *map(sympy.Integer, (32, 4, TILE_BLOCKS))],
    )
    flat: ir.TensorBox = view(tiles, [tiled_size(rows, blocks)])
    return flat


def tiled_size(rows: Any, blocks: Any) -> Any:
    """Returns the number of bytes of tiled scales of [rows, blocks]; sizes may be symbolic."""
    down, across = _tiles(rows, blocks)
    return down * across * (TILE_ROWS * TILE_BLOCKS)


def _tiles(rows: Any, blocks: Any) -> tuple[Any, Any]:
    # not `scale_tiles.tiled_length`: the // of sympy is a floor, which Inductor computes in floating point
    return FloorDiv(rows + TILE_ROWS - 1, TILE_ROWS), FloorDiv(blocks + TILE_BLOCKS - 1, TILE_BLOCKS)


def offset_of(row: Any, block: Any, blocks: Any) -> Any:
    """Returns the offset of the byte of (row, block) in tiled scales of rows with `blocks` blocks."""
    _, across = _tiles(row, blocks)
    tile = FloorDiv(row, TILE_ROWS) * across + FloorDiv(block, TILE_BLOCKS)
    inside = ModularIndexing(row, 1, 32) * 16 + ModularIndexing(row, 32, 4) * 4
    return tile * (TILE_ROWS * TILE_BLOCKS) + inside + ModularIndexing(block, 1, TILE_BLOCKS)


def less(index: Any, end: Any) -> Any:
    """Whether `index` is less than `end`, sizes or expressions of indices."""
    return inductor.lt(inductor.index_expr(index, torch.int64), inductor.index_expr(end, torch.int64))
