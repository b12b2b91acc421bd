"""Inductor template of ``mx.matmul`` on tiled scales: persistent, loads by the tensor memory accelerator.

The kernel computes what `scaled_mm` computes. It makes descriptors on the device from plain pointers, so that
it is called like other kernels. A program per multiprocessor loops over tiles of the result. The accelerator
reads zeros outside of a matrix.

`fits` checks conditions; ``templates.scaled_mm`` runs all other products with pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import Any

from torch._inductor.kernel.mm_common import persistent_mm_grid

from mxcompile.lowering.chips.tiles import TiledConfig
from mxcompile.lowering.choices import configs
from mxcompile.lowering.templates import persistent
from mxcompile.lowering.templates.coding import GAIN, HEAD
from mxcompile.lowering.templates.persistent import PARTS, STORE, Descriptors

_SOURCE = (
    r"""
from mxcompile.lowering.kernels import scale_bytes, scaled_tile, tma_tile

"""
    + HEAD.replace("OTHERS", "[]")
    + r"""
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    a_desc = tma_tile.operand(A, M, K, {{stride("A", 1 - A_K_MAJOR)}}, BLOCK_M, BLOCK_K, A_K_MAJOR)
    b_desc = tma_tile.operand(B, N, K, {{stride("B", 0 + B_K_MAJOR)}}, BLOCK_N, BLOCK_K, B_K_MAJOR)
    sa_desc = scale_bytes.tiled_descriptor(SA, M, K, BLOCK_M, BLOCK_K // BLOCK, BLOCK)
    sb_desc = scale_bytes.tiled_descriptor(SB, N, K, BLOCK_N, BLOCK_K // BLOCK, BLOCK)
    WIDTH: tl.constexpr = BLOCK_N // 2**HALVINGS
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cast(tl.cdiv(K, BLOCK_K), tl.int32)
    end_m = M
    for tile in tl.range(tl.program_id(0), num_tiles, NUM_SMS, warp_specialize=WARP_SPECIALIZE):
        pid_m, pid_n = scaled_tile.tile_of(tile, M, N, BLOCK_M, BLOCK_N)
        pid_m, pid_n = pid_m.to(tl.int32), pid_n.to(tl.int32)
        row = pid_m * BLOCK_M
        acc = tma_tile.tile_product(
            a_desc, sa_desc, b_desc, sb_desc, row, 0, pid_m * (BLOCK_M // 128),
            pid_n * BLOCK_N, 0, pid_n * (BLOCK_N // 128), 0, steps,
            ELEM_A, ELEM_B, BLOCK, A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K)
"""
    + PARTS
    + indent(GAIN.replace("ACC", "columns"), 8 * " ")
    + r"""
{% if BIASED %}
            columns += tl.load(BIAS + idx_n, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
"""
    + STORE.replace("INDICES", '("idx_m", "idx_n")')
)

TEMPLATE = Descriptors(name="mx_scaled_mm_tiled", grid=persistent_mm_grid, source=_SOURCE)


def fits(operands: Sequence[Any]) -> bool:
    """Whether this form can run the product: tiled scales, and operands that the accelerator can read.

    operands: a [M, K], its scale, b [K, N], its scale, and the bias if there is one.
    """
    a, scale_a, b, scale_b, *_ = operands
    if any(len(scale.get_size()) != 1 for scale in (scale_a, scale_b)):
        return False
    return all(map(persistent.starts_aligned, operands[:4])) and None not in map(_contiguous, (a, b))


def _contiguous(operand: Any) -> int | None:
    return configs.contiguous(operand.get_stride())


def arguments(operands: Sequence[Any], tile: TiledConfig) -> dict[str, Any]:
    """Returns the template's arguments for `tile`, except arguments that all forms share."""
    a, _, b, *_ = operands
    return {
        **persistent.arguments(tile),
        "WARP_SPECIALIZE": tile.warp_specialize,
        "A_K_MAJOR": _contiguous(a) == 1,
        "B_K_MAJOR": _contiguous(b) == 0,
    }
