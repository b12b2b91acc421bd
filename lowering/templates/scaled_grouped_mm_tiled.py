"""Inductor templates of ``mx.grouped_matmul`` on tiled scales, loads by the tensor memory accelerator.

The kernels compute what `scaled_grouped_mm` computes. They are persistent, as `scaled_mm_tiled`: a program
per multiprocessor. `group_scales` tiles scales by group. A tile of rows begins at any row; it reads rows past
its group's end, but does not store them. The accelerator reads zeros outside of `a` and `b`. The matrices of
`b` are stacked. If they are K-major, the accelerator reads zeros past K. If they are N-major, it reads the
next matrix, so K must be whole steps.

Along K a group may begin and end inside blocks of 32 that it shares. Its descriptors cover its rows alone,
and its steps begin at its first block's start, so that the accelerator reads zeros before the group's first
row and past its last row. Rows are then the outer dimension: both operands are contiguous along M and N, as
the columnwise casts that wgrad reads are.

`tiles` and `k_tiles` check conditions; ``templates.scaled_grouped_mm`` runs all other products with pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import Any

from torch._inductor.virtualized import V

from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.choices import configs
from mxcompile.lowering.templates import persistent
from mxcompile.lowering.templates.coding import GAIN, HEAD
from mxcompile.lowering.templates.persistent import PARTS, STORE, Descriptors
from mxcompile.lowering.templates.tile import batch_grid, rows_grid

_ROWS_SOURCE = (
    r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_tile, tma_tile
"""
    + HEAD.replace("OTHERS", '["OFFS"]')
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 2)}}
    K = {{size("A", 1)}}
    a_desc = tma_tile.operand(A, M, K, {{stride("A", 1 - A_K_MAJOR)}}, BLOCK_M, BLOCK_K, A_K_MAJOR)
{% if B_K_MAJOR %}
    b_desc = tma_tile.operand(B, NUM_GROUPS * N, K, {{stride("B", 2)}}, BLOCK_N, BLOCK_K, True)
{% else %}
    b_desc = tma_tile.operand(B, N, NUM_GROUPS * K, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, False)
{% endif %}
    tiles_m = tl.cdiv(M, BLOCK_M) + NUM_GROUPS
    sa_desc = scale_bytes.tiled_descriptor(SA, tiles_m * BLOCK_M, K, BLOCK_M, BLOCK_K // BLOCK, BLOCK)
    sb_desc = scale_bytes.tiled_descriptor(
        SB, NUM_GROUPS * tl.cdiv(N, 128) * 128, K, BLOCK_N, BLOCK_K // BLOCK, BLOCK)
    WIDTH: tl.constexpr = BLOCK_N // 2**HALVINGS
    num_tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_SMS):
        tile_m, pid_n = scaled_tile.tile_of(tile, tiles_m * BLOCK_M, N, BLOCK_M, BLOCK_N)
        tile_m, pid_n = tile_m.to(tl.int32), pid_n.to(tl.int32)
        group, row, end_m = scaled_tile.group_of(OFFS, tile_m, M, NUM_GROUPS, POWER, BLOCK_M)
        steps = tl.where((group < NUM_GROUPS) & (row < end_m), tl.cdiv(K, BLOCK_K), 0).to(tl.int32)
        entry = tl.minimum(group, NUM_GROUPS - 1)
        sb_row = (entry * tl.cdiv(N, 128) + pid_n * (BLOCK_N // 128)).to(tl.int32)
{% if B_K_MAJOR %}
        b_row, b_k = (entry * N + pid_n * BLOCK_N).to(tl.int32), 0
{% else %}
        b_row, b_k = pid_n * BLOCK_N, (entry * K).to(tl.int32)
{% endif %}
        acc = tma_tile.tile_product(
            a_desc, sa_desc, b_desc, sb_desc, row, 0, tile_m * (BLOCK_M // 128), b_row, b_k, sb_row, 0, steps,
            ELEM_A, ELEM_B, BLOCK, A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K)
"""
    + PARTS
    + indent(GAIN.replace("ACC", "columns"), 8 * " ")
    + STORE.replace("INDICES", '("idx_n", "idx_m") if COLUMNS else ("idx_m", "idx_n")')
)

_K_SOURCE = (
    r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_tile, tma_tile
"""
    + HEAD.replace("OTHERS", '["OFFS"]')
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    padded = {{size("SA", 1)}} // 4
    sa_desc = scale_bytes.tiled_descriptor(SA, M, padded, BLOCK_M, BLOCK_K // BLOCK)
    sb_desc = scale_bytes.tiled_descriptor(SB, N, padded, BLOCK_N, BLOCK_K // BLOCK)
    WIDTH: tl.constexpr = BLOCK_N // 2**HALVINGS
    end_m = M
    entry = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), NUM_GROUPS * entry, NUM_SMS):
        group = tile // entry
        idx_q = group.to(INDEX_DTYPE)
        pid_m, pid_n = scaled_tile.tile_of(tile % entry, M, N, BLOCK_M, BLOCK_N)
        pid_m, pid_n = pid_m.to(tl.int32), pid_n.to(tl.int32)
        row = pid_m * BLOCK_M
        begin, end, first_tile = scaled_tile.span_of(OFFS, group, NUM_GROUPS, POWER)
        length, before = end - begin, begin % 32
        start, inside = begin.to(tl.int64), tl.maximum(length, 1)
        a_desc = tma_tile.operand(
            A + start * {{stride("A", 1)}}, M, inside, {{stride("A", 1)}}, BLOCK_M, BLOCK_K, False)
        b_desc = tma_tile.operand(
            B + start * {{stride("B", 0)}}, N, inside, {{stride("B", 0)}}, BLOCK_N, BLOCK_K, False)
        steps = tl.where(length > 0, tl.cdiv(before + length, BLOCK_K), 0)
        acc = tma_tile.tile_product(
            a_desc, sa_desc, b_desc, sb_desc, row, -before, pid_m * (BLOCK_M // 128),
            pid_n * BLOCK_N, -before, pid_n * (BLOCK_N // 128), first_tile, steps,
            ELEM_A, ELEM_B, BLOCK, False, False, BLOCK_M, BLOCK_N, BLOCK_K)
"""
    + PARTS
    + STORE.replace("INDICES", '("idx_q", "idx_m", "idx_n")')
)


ROWS_TEMPLATE = Descriptors(name="mx_scaled_grouped_mm_tiled", grid=rows_grid, source=_ROWS_SOURCE)
K_TEMPLATE = Descriptors(name="mx_scaled_grouped_mm_k_tiled", grid=batch_grid, source=_K_SOURCE)


def arguments(tile: TiledConfig, groups: int) -> dict[str, Any]:
    """Returns the arguments of both templates for `tile`, without the arguments of a `Coding`."""
    return {**persistent.arguments(tile), "NUM_GROUPS": groups, "POWER": 1 << groups.bit_length()}


def majorness(a: Any, b: Any) -> dict[str, bool]:
    """Returns the majorness arguments of `ROWS_TEMPLATE`. a: [M, K]. b: [G, K, N]."""
    return {
        "A_K_MAJOR": configs.contiguous(a.get_stride()) == 1,
        "B_K_MAJOR": configs.contiguous(b.get_stride()[1:]) == 0,
    }


def tiles(target: Any, operands: Sequence[Any], rows: Any) -> list[TiledConfig]:
    """Returns the tiles to try, the default first; [] if the pointer form runs. rows: rows of a group."""
    a, _, b, *_ = operands
    if not all(map(persistent.starts_aligned, (a, b))):
        return []
    sizes = map(V.graph.sizevars.optimization_hint, (*a.get_size(), b.get_size()[2], rows))
    m, k, n, average = sizes
    table_tiles = configs.tiled_groups(target, average, m, n, k)
    sides = a.get_stride(), b.get_size(), b.get_stride()
    return [tile for tile in table_tiles if configs.grouped_fits(*sides, tile)]


def k_tiles(target: Any, operands: Sequence[Any], groups: int) -> list[TiledConfig]:
    """Returns the tiles to try for groups of K of a [M, K] · b [K, N]; [] if the pointer form runs."""
    a, _, b, *_ = operands
    if not all(map(persistent.starts_aligned, (a, b))):
        return []
    sizes = (*a.get_size(), b.get_size()[1])
    m, k, n = map(V.graph.sizevars.optimization_hint, sizes)
    return configs.tiled_groups_of_k(target, (m, n, k), groups, a.get_stride(), b.get_stride())
