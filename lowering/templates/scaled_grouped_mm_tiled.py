"""Inductor template of the groups of rows of ``mx.scaled_grouped_mm`` on tiled scales, loads by TMA.

    out[m] = a[m] · b[g]          where offs[g−1] ≤ m < offs[g]; 0 past the last group

The loop of `scaled_mm_tiled` over the tiles of `scaled_grouped_mm`: persistent, a program per multiprocessor.
A tile begins at any row; what it reads past its group's end are rows that it does not store. Scales come in
the tiles of each group, which `group_scales` makes. The tensor memory accelerator fills with zeros what lies
outside of `a`, and of `b`, whose matrices are one below the other, what is past K if it is K-major; else K
must be whole steps.

Wants what `fits` says; the pointer form of ``templates.scaled_grouped_mm`` takes the rest. Groups of K too:
they end inside blocks, whose other elements must be masked, which the accelerator cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch._inductor.select_algorithm import SymbolicGridFn
from torch._inductor.utils import get_num_sms
from torch._inductor.virtualized import V

from mxcompile.formats import elem_type
from mxcompile.lowering.kernels.configs import TiledConfig
from mxcompile.lowering.templates import configs, scaled_mm_tiled

_SOURCE = r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_mm, scaled_mm_tiled, scaled_tile

{{def_kernel("A", "SA", "B", "SB", "OFFS")}}
    M = {{size("A", 0)}}
    N = {{size("B", 2)}}
    K = {{size("A", 1)}}
{% if A_K_MAJOR %}
    a_desc = tl.make_tensor_descriptor(A, [M, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
{% else %}
    a_desc = tl.make_tensor_descriptor(A, [K, M], [{{stride("A", 1)}}, 1], [BLOCK_K, BLOCK_M])
{% endif %}
{% if B_K_MAJOR %}
    b_desc = tl.make_tensor_descriptor(B, [NUM_GROUPS * N, K], [{{stride("B", 2)}}, 1], [BLOCK_N, BLOCK_K])
{% else %}
    b_desc = tl.make_tensor_descriptor(B, [NUM_GROUPS * K, N], [{{stride("B", 1)}}, 1], [BLOCK_K, BLOCK_N])
{% endif %}
    tiles_m = tl.cdiv(M, BLOCK_M) + NUM_GROUPS
    sa_desc = scale_bytes.tiled_descriptor(SA, tiles_m * BLOCK_M, K, BLOCK_M, BLOCK_K // 32)
    sb_desc = scale_bytes.tiled_descriptor(SB, NUM_GROUPS * tl.cdiv(N, 128) * 128, K, BLOCK_N, BLOCK_K // 32)
    WIDTH: tl.constexpr = BLOCK_N // 2**HALVINGS
    num_tiles = tiles_m * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_SMS):
        tile_m, pid_n = scaled_mm.tile_of(tile, tiles_m * BLOCK_M, N, BLOCK_M, BLOCK_N)
        tile_m, pid_n = tile_m.to(tl.int32), pid_n.to(tl.int32)
        group, first, end_m = scaled_tile.group_of(OFFS, tile_m, M, NUM_GROUPS, POWER, BLOCK_M)
        steps = tl.where((group < NUM_GROUPS) & (first < end_m), tl.cdiv(K, BLOCK_K), 0).to(tl.int32)
        operand = tl.minimum(group, NUM_GROUPS - 1)
        sb_row = (operand * tl.cdiv(N, 128) + pid_n * (BLOCK_N // 128)).to(tl.int32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
{% if A_K_MAJOR %}
            a = a_desc.load([first, step * BLOCK_K])
{% else %}
            a = a_desc.load([step * BLOCK_K, first]).T
{% endif %}
{% if B_K_MAJOR %}
            b = b_desc.load([(operand * N + pid_n * BLOCK_N).to(tl.int32), step * BLOCK_K]).T
{% else %}
            b = b_desc.load([(operand * K + step * BLOCK_K).to(tl.int32), pid_n * BLOCK_N])
{% endif %}
            sa = scaled_mm_tiled.load_scale(sa_desc, tile_m, step, BLOCK_M, BLOCK_K // 32)
            sb = scaled_mm_tiled.load_scale_at(sb_desc, sb_row, step, BLOCK_N, BLOCK_K // 32)
            acc = tl.dot_scaled(a, sa, ELEM_A, b, sb, ELEM_B, acc)
        parts = scaled_mm_tiled.columns_of(acc, HALVINGS)
        for part in tl.static_range(2**HALVINGS):
            idx_m = (first + tl.arange(0, BLOCK_M))[:, None].to(INDEX_DTYPE)
            idx_n = (pid_n * BLOCK_N + part * WIDTH + tl.arange(0, WIDTH))[None, :]
            mask = (idx_m < end_m) & (idx_n < N)
            columns = parts[part]
{% if COLUMNS %}
            {{store_output(("idx_n", "idx_m"), "columns", "mask", indent_width=12,
                           val_shape=("BLOCK_M", "WIDTH"))}}
{% else %}
            {{store_output(("idx_m", "idx_n"), "columns", "mask", indent_width=12,
                           val_shape=("BLOCK_M", "WIDTH"))}}
{% endif %}
"""


@SymbolicGridFn
def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:  # noqa: A002
    if meta["COLUMNS"]:
        m, n = n, m
    tiles = (cdiv(m, meta["BLOCK_M"]) + meta["NUM_GROUPS"]) * cdiv(n, meta["BLOCK_N"])
    return min(meta["NUM_SMS"], tiles), 1, 1


TEMPLATE = scaled_mm_tiled.Descriptors(name="mx_scaled_grouped_mm_tiled", grid=_grid, source=_SOURCE)


def fits(a: Any, b: Any, tile: TiledConfig) -> bool:
    """Whether `tile` can run the product of realized a [M, K] and b [G, K, N]."""
    aligned = scaled_mm_tiled.starts_aligned
    sides = (a.get_stride(), b.get_size(), b.get_stride())
    return aligned(a) and aligned(b) and configs.grouped_fits(*sides, tile)


def arguments(operands: Sequence[Any], tile: TiledConfig, groups: int) -> dict[str, Any]:
    """The template's arguments for `tile`, but for COLUMNS. operands: a, its scale, b, its scale, offs."""
    a, _, b, *_ = operands
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HALVINGS": tile.halvings,
        "NUM_SMS": get_num_sms(),
        "NUM_GROUPS": groups,
        "POWER": 1 << groups.bit_length(),
        "A_K_MAJOR": configs.contiguous(a.get_stride()) == 1,
        "B_K_MAJOR": configs.contiguous(b.get_stride()[1:]) == 0,
        "ELEM_A": repr(elem_type(a.get_dtype()).name),
        "ELEM_B": repr(elem_type(b.get_dtype()).name),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def tiles(target: Any, operands: Sequence[Any], rows: Any) -> Iterator[TiledConfig]:
    """The tiles to try, the default first; none where the pointer form is to run it. rows: of a group."""
    a, _, b, *_ = operands
    sizes = map(V.graph.sizevars.optimization_hint, (*a.get_size(), b.get_size()[2], rows))
    m, k, n, average = sizes
    for tile in configs.tiled_groups(target, average, m, n, k):
        if fits(a, b, tile):
            yield tile
