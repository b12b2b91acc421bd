"""Inductor templates of ``mx.grouped_matmul``: one grid for all groups, whose ends the kernel reads.

    groups of rows    out[m] = a[m] · b[g]          where offs[g−1] ≤ m < offs[g]; 0 past the last group
    groups of K       out[g] = Σ_k a[:, k] · b[k]   where offs[g−1] ≤ k < offs[g]; 0 for an empty group

Groups of columns are groups of rows of the transposed product. Rows have at most ⌈M / BLOCK_M⌉ + G tiles,
including rows past the last group, for any groups. The grid has as many; programs without a tile do nothing.
Along K, blocks of 32 are counted over the whole operand: a group reads the scales of the blocks it shares
with its neighbours, and masks its neighbours' elements. Accumulation is FP32, scales are row-major.

On chips with tensor memory, groups of many rows and long groups of K run in `scaled_grouped_mm_tiled`, which
reads tiled scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import permute, register_lowering
from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from mxcompile import ops
from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.choices import configs, defaults
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import (
    call,
    examples,
    group_scales,
    scaled_bmm,
    scaled_grouped_mm_tiled,
    vendor,
)
from mxcompile.lowering.templates.coding import HEAD, Coding
from mxcompile.lowering.templates.tile import IMPORTS, STORE, TILE, batch_grid, rows_grid, select

_ROWS_SOURCE = (
    IMPORTS
    + HEAD.replace("OTHERS", '["OFFS"]')
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 2)}}
    tiles_m = tl.cdiv(M, BLOCK_M) + NUM_GROUPS
    tile, pid_n = tile_of(tl.program_id(0), tiles_m * BLOCK_M, N, BLOCK_M, BLOCK_N)
    group, first, end_m = scaled_tile.group_of(OFFS, tile, M, NUM_GROUPS, POWER, BLOCK_M)
    rm = first + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    length = {{size("A", 1)}}
    begin, end = 0, tl.where(group < NUM_GROUPS, length * scaled_tile.packed(ELEM_A), 0)
    operand = tl.minimum(group, NUM_GROUPS - 1).to(tl.int64)
    a = A
    sa = SA
    b = B + operand * {{stride("B", 0)}}
    sb = SB + operand * {{stride("SB", 0)}}
"""
    + TILE
    + STORE.replace("INDICES", '("idx_n", "idx_m") if COLUMNS else ("idx_m", "idx_n")')
)

_K_SOURCE = (
    IMPORTS
    + HEAD.replace("OTHERS", '["OFFS"]')
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    entry = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    idx_q = (tl.program_id(0) // entry).to(INDEX_DTYPE)
    begin = tl.load(OFFS + idx_q - 1, mask=idx_q > 0, other=0).to(tl.int32)
    end = tl.load(OFFS + idx_q).to(tl.int32)
    end = tl.where(begin < end, end, 0)
    length = {{size("A", 1)}}
    pid_m, pid_n = tile_of(tl.program_id(0) % entry, M, N, BLOCK_M, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    end_m = M
    a = A
    sa = SA
    b = B
    sb = SB
"""
    + TILE
    + STORE.replace("INDICES", '("idx_q", "idx_m", "idx_n")')
)


ROWS_TEMPLATE = TritonTemplate(name="mx_scaled_grouped_mm", grid=rows_grid, source=_ROWS_SOURCE)
K_TEMPLATE = TritonTemplate(name="mx_scaled_grouped_mm_k", grid=batch_grid, source=_K_SOURCE)


@register_lowering(ops.grouped_matmul, type_promotion_kind=None)
def lower_grouped_matmul(
    a: ir.TensorBox,
    scale_a: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    offs: ir.TensorBox,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensors: Sequence[ir.TensorBox] | None = None,
) -> ir.TensorBox:
    """Returns the products of all groups, for operators that `graph.native` left in the graph."""
    size = [a.get_size()[-2], b.get_size()[-1]]
    if len(a.get_size()) == len(b.get_size()):  # groups of K, and batches
        size = [offs.get_size()[0], *size]
    sides, coding = [a, scale_a, b, scale_b], Coding.from_operands(a, b, format_a, tensors, size)
    match len(a.get_size()), len(b.get_size()):
        case 2, 2:
            return _groups_of_k(sides, offs, out_dtype, coding)
        case 2, 3:
            return _groups_of_rows(sides, offs, out_dtype, coding, columns=False)
        case 3, 2:
            sides = [permute(side, _SWAPPED[len(side.get_size())]) for side in (b, scale_b, a, scale_a)]
            return _groups_of_rows(sides, offs, out_dtype, coding.swapped, columns=True)
        case _:
            return scaled_bmm.lower(sides, None, out_dtype, coding)


_SWAPPED = {2: [1, 0], 3: [0, 2, 1]}


def _groups_of_rows(
    sides: list[ir.TensorBox], offs: ir.TensorBox, out_dtype: torch.dtype, coding: Coding, *, columns: bool
) -> ir.TensorBox:
    """Returns the products of groups of rows, a [M, K] · b [G, K, N], as [M, N], or [N, M] if `columns`."""
    operands = [realize_inputs(side) for side in (*sides, offs)]
    m, (groups, _, n) = operands[0].get_size()[0], operands[2].get_size()
    layout = ir.FixedLayout(offs.get_device_or_error(), out_dtype, [n, m] if columns else [m, n])
    tile_sizes = scaled_grouped_mm_tiled.tiles(of_device(layout.device), operands, CeilDiv(m, groups))
    if tile_sizes:
        return _tiled(operands, layout, tile_sizes, coding, columns=columns)
    return select(
        ROWS_TEMPLATE,
        [*operands, *coding.tensors],
        layout,
        CeilDiv(m, groups),
        coding,
        examples.grouped(operands, m, coding),
        BIASED=False,
        COLUMNS=columns,
        NUM_GROUPS=int(groups),
        POWER=1 << int(groups).bit_length(),
    )


def _tiled(
    operands: list[Any], layout: ir.Layout, tiles: list[TiledConfig], coding: Coding, *, columns: bool
) -> ir.TensorBox:
    """Returns the products of groups of rows in the form that `defaults` or autotuning chooses."""
    a, scale_a, b, scale_b, offs = operands
    groups = int(b.get_size()[0])
    boxed = ir.TensorBox(scale_b) if isinstance(scale_b, ir.StorageBox) else ir.TensorBox.create(scale_b)
    rows_of = permute(boxed, [0, 2, 1])
    tiled_a = group_scales.of_groups(scale_a, offs, groups)
    tiled_b = group_scales.of_matrices(realize_inputs(rows_of))
    sides = [a, tiled_a, b, tiled_b, offs]
    library = not columns and vendor.fits_groups(sides, layout.dtype)
    if not configs.autotuning():
        m, k, n = map(V.graph.sizevars.optimization_hint, (*a.get_size(), b.get_size()[2]))
        target = of_device(layout.device)
        form = coding.default_form(defaults.ROWS, (m, n, k), tiles, target, library=library)
        tiles, library = tiles[: int(form != defaults.VENDOR)], form == defaults.VENDOR
    keywords = {"COLUMNS": columns, **scaled_grouped_mm_tiled.majorness(a, b)}
    template = scaled_grouped_mm_tiled.ROWS_TEMPLATE
    tried = _tried(template, tiles, groups, coding, **keywords) + [(vendor.GROUPED, {})] * library
    inputs = examples.grouped(sides, a.get_size()[0], coding)
    kernel_inputs = [*sides, *coding.tensors]
    return call.best(template.name, kernel_inputs, layout, tried, examples=inputs, at_once=True)


def _tried(
    template: TritonTemplate, tiles: list[TiledConfig], groups: int, coding: Coding, **keywords: bool
) -> list[tuple[Any, dict[str, Any]]]:
    shared = {**coding.arguments, "BIASED": False, **keywords}
    return [(template, scaled_grouped_mm_tiled.arguments(tile, groups) | shared) for tile in tiles]


def _groups_of_k(
    sides: list[ir.TensorBox], offs: ir.TensorBox, out_dtype: torch.dtype, coding: Coding
) -> ir.TensorBox:
    """Returns the products of groups of K, a [M, K] · b [K, N], as [G, M, N]."""
    operands = [realize_inputs(side) for side in (*sides, offs)]
    a, scale_a, b, _, ends = operands
    (m, k), n, groups = a.get_size(), b.get_size()[1], int(offs.get_size()[0])
    layout = ir.FixedLayout(offs.get_device_or_error(), out_dtype, [groups, m, n])
    tiles = scaled_grouped_mm_tiled.k_tiles(of_device(layout.device), operands, groups)
    if not tiles:
        inputs = examples.grouped(operands, k * coding.per_byte, coding)
        return select(
            K_TEMPLATE, [*operands, *coding.tensors], layout, m, coding, inputs, span=True, BIASED=False
        )
    scales = scale_a, realize_inputs(permute(sides[3], [1, 0]))
    tiled = [group_scales.of_groups_of_k(scale, ends, groups) for scale in scales]
    kernel_inputs = [a, tiled[0], b, tiled[1], ends]
    template = scaled_grouped_mm_tiled.K_TEMPLATE
    tried = _tried(template, tiles if configs.autotuning() else tiles[:1], groups, coding)
    inputs = examples.grouped(kernel_inputs, k, coding)
    return call.best(template.name, kernel_inputs, layout, tried, examples=inputs, at_once=True)
