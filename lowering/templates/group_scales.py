"""Inductor template that copies the scales of grouped products into the tiles that the product reads.

    scale[rows, blocks], groups of rows   →   tiles of each group, its rows padded to whole tiles, one group
                                              after the other; rows past the last group are a group too
    scale[rows, blocks], groups of K      →   rows of tiles, each group's blocks padded to whole tiles, one
                                              group after the other
    scale[G, rows, blocks]                →   tiles of each matrix

Row t of the result is a row of tiles, for 128 rows of the operand, as in ``formats.scale_tiles``; padding is
0. The number of rows does not depend on where groups end: it is ⌈rows / 128⌉ + G, the number of tiles in
`scaled_grouped_mm`, and tile t of the product reads row t. For groups of K the number of tiles in a row does
not either: it is ⌈blocks / 4⌉ + 2 G, since a group may end with part of a tile and with a shared block.

A separate kernel makes the tiles, because a cast does not get the ends of the groups, where tiles begin. The
cast of a matrix writes tiles itself. The kernel moves 1/16 byte for each element, the cast 3 to 4 bytes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, realize_inputs
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS
from mxcompile.lowering.templates import call

_SOURCE = r"""
from mxcompile.lowering.kernels import scaled_tile

{% if not NUM_GROUPS %}
{{def_kernel("SCALE")}}
    rows = {{size("SCALE", 1)}}
    blocks = {{size("SCALE", 2)}}
    idx_t = tl.program_id(0)
    first = idx_t % tl.cdiv(rows, 128) * 128
    end = rows
    scale = SCALE + (idx_t // tl.cdiv(rows, 128)).to(tl.int64) * {{stride("SCALE", 0)}}
    stride_row = {{stride("SCALE", 1)}}
    stride_block = {{stride("SCALE", 2)}}
{% else %}
{{def_kernel("SCALE", "OFFS")}}
    rows = {{size("SCALE", 0)}}
    blocks = {{size("SCALE", 1)}}
    idx_t = tl.program_id(0)
{% if ALONG_K %}
    first, end = idx_t * 128, rows
{% else %}
    _, first, end = scaled_tile.group_of(OFFS, idx_t, rows, NUM_GROUPS, POWER, 128)
{% endif %}
    scale = SCALE
    stride_row = {{stride("SCALE", 0)}}
    stride_block = {{stride("SCALE", 1)}}
{% endif %}
    idx_p = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    row = first + idx_p % 16 // 4 * 32 + idx_p % 512 // 16
{% if ALONG_K %}
    begin, blocks = scaled_tile.scale_tile_of(OFFS, tl.program_id(1), NUM_GROUPS, POWER)
    block = begin + idx_p % 4
    mask = idx_p >= 0
{% else %}
    block = idx_p // 512 * 4 + idx_p % 4
    mask = idx_p < tl.cdiv(blocks, 4) * 512
{% endif %}
    byte = tl.load(
        scale + row.to(tl.int64) * stride_row + block.to(tl.int64) * stride_block,
        mask=mask & (row < end) & (block < blocks), other=0)
    {{store_output(("idx_t", "idx_p"), "byte", "mask", val_shape=("BYTES",))}}
"""

_BYTES = 512
"""Bytes that a program copies: one tile, which belongs to one group."""


@SymbolicGridFn
def _grid(tiles: Any, width: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return tiles, cdiv(width, meta["BYTES"]), 1


TEMPLATE = TritonTemplate(name="mx_tile_scales", grid=_grid, source=_SOURCE)

_TILES: WeakKeyDictionary[Any, dict[tuple[str, ...], ir.TensorBox]] = WeakKeyDictionary()
"""Results by Inductor's graph, then by operands: layers that read one activation share its tiles."""


def of_groups(scale: Any, offs: Any, groups: int) -> ir.TensorBox:
    """Returns the tiled scales [⌈rows / 128⌉ + groups, ⌈blocks / 4⌉ · 512], uint8, of groups of rows."""
    rows, blocks = scale.get_size()
    return _tiled([scale, offs], CeilDiv(rows, TILE_ROWS) + groups, CeilDiv(blocks, TILE_BLOCKS))


def of_groups_of_k(scale: Any, offs: Any, groups: int) -> ir.TensorBox:
    """Returns the tiled scales [⌈rows / 128⌉, (⌈blocks / 4⌉ + 2 · groups) · 512], uint8, of groups of K."""
    rows, blocks = scale.get_size()
    across = CeilDiv(blocks, TILE_BLOCKS) + 2 * groups
    return _tiled([scale, offs], CeilDiv(rows, TILE_ROWS), across, along_k=True)


def of_matrices(scale: Any) -> ir.TensorBox:
    """Returns the tiled scales [G · ⌈rows / 128⌉, ⌈blocks / 4⌉ · 512], uint8, of scales [G, rows, blocks]."""
    matrices, rows, blocks = scale.get_size()
    return _tiled([scale], matrices * CeilDiv(rows, TILE_ROWS), CeilDiv(blocks, TILE_BLOCKS))


def _tiled(operands: list[Any], down: Any, across: Any, *, along_k: bool = False) -> ir.TensorBox:
    cache = _TILES.setdefault(V.graph, {})
    key = (str(along_k), *(f"{operand.get_name()} {operand.get_layout()}" for operand in operands))
    if key not in cache:
        width = across * (TILE_ROWS * TILE_BLOCKS)
        groups = int(operands[1].get_size()[0]) if len(operands) > 1 else 0
        (tiles,) = call.only(
            TEMPLATE,
            operands,
            [([down, width], torch.uint8)],
            num_warps=4,
            num_stages=1,
            BYTES=_BYTES,
            ALONG_K=along_k,
            NUM_GROUPS=groups,
            POWER=1 << groups.bit_length(),
        )
        cache[key] = realize_inputs(tiles)
    return cache[key]
