"""Quantize: one read of a matrix, its MX copy along the rows, along the columns, or both.

    rowwise      codes [M, N], scales along N        (what fprop and dgrad contract)
    columnwise   codes [M, N], scales along M        (what wgrad contracts)
    square       one scale for 32×32 elements: the codes of both layouts are the same

Scale bytes are row-major, [M, ⌈N/32⌉] rowwise and [⌈M/32⌉, N] columnwise, or in the 128×4 tiled layout of
`tiles.swizzled_offset` whose rows are the operand's rows in the GEMM: M rowwise, N columnwise. There the grid
covers the padding too, and what is padded is zero. Any M and N; offsets are 64-bit. Not here: transposed
copies, which no chip with a native MX GEMM needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxcompile.formats import BLOCK, Format, ScaleLayout, Tile, num_blocks
from mxcompile.formats.scale_tiles import TILE_ROWS, tiled_length
from mxcompile.lowering.kernels import scale_bytes, tiles
from mxcompile.lowering.kernels.configs import QUANTIZE, chosen
from mxcompile.lowering.kernels.launch import Launch, ceil_div, power_of_two
from mxcompile.lowering.targets import Target


class Layout(StrEnum):
    """Which MX copies one launch makes."""

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One MX copy of a matrix [M, N]: qdata [M, N], FP8, and scale bytes, uint8 (flat if tiled 128×4)."""

    qdata: Tensor
    scale: Tensor


@triton.jit
def quantize_kernel(
    x_ptr,
    rowwise_ptr,
    rowwise_scale_ptr,
    columnwise_ptr,
    columnwise_scale_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    ELEM: tl.constexpr,
    ROUNDING: tl.constexpr,
    SQUARE: tl.constexpr,
    TILED: tl.constexpr,
    NATIVE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile. A copy that is not wanted has None for its pointers; layouts: see the head of this file."""
    ROW_BLOCKS: tl.constexpr = BLOCK_N // tiles.BLOCK
    COLUMN_BLOCKS: tl.constexpr = BLOCK_M // tiles.BLOCK
    tiles_n = tl.cdiv(tl.cdiv(N, PADDING) * PADDING, BLOCK_N)
    pid_m, pid_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_blocks = pid_n * ROW_BLOCKS + tl.arange(0, ROW_BLOCKS)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    x_offset = rows[:, None].to(tl.int64) * stride_xm + columns[None, :].to(tl.int64) * stride_xn
    x = tl.load(x_ptr + x_offset, mask=inside, other=0.0).to(tl.float32)
    out_offset = rows[:, None].to(tl.int64) * N + columns[None, :]
    if rowwise_ptr is not None:
        if SQUARE:
            codes, byte = tiles.quantize_square(x, ELEM, ROUNDING, NATIVE)
            byte = tl.broadcast_to(byte[:, None, :], (COLUMN_BLOCKS, tiles.BLOCK, ROW_BLOCKS))
            byte = tl.reshape(byte, (BLOCK_M, ROW_BLOCKS))
        else:
            codes, byte = tiles.quantize_rowwise(x, ELEM, ROUNDING, NATIVE)
        tl.store(rowwise_ptr + out_offset, codes, mask=inside)
        scale_bytes.store_rowwise(rowwise_scale_ptr, byte, rows, row_blocks, M, N, TILED)
    if columnwise_ptr is not None:
        column_blocks = pid_m * COLUMN_BLOCKS + tl.arange(0, COLUMN_BLOCKS)
        if SQUARE:
            codes, byte = tiles.quantize_square(x, ELEM, ROUNDING, NATIVE)
            byte = tl.broadcast_to(byte[:, :, None], (COLUMN_BLOCKS, ROW_BLOCKS, tiles.BLOCK))
            byte = tl.reshape(byte, (COLUMN_BLOCKS, BLOCK_N))
        else:
            codes, byte = tiles.quantize_columnwise(x, ELEM, ROUNDING, NATIVE)
        tl.store(columnwise_ptr + out_offset, codes, mask=inside)
        scale_bytes.store_columnwise(columnwise_scale_ptr, byte, column_blocks, columns, M, N, TILED)


def scale_shape(m: int, n: int, layout: Layout, scales: ScaleLayout) -> tuple[int, ...]:
    """Shape of the scale bytes of one copy, rowwise or columnwise, of a matrix [m, n]."""
    rowwise = layout is Layout.ROWWISE
    if scales is ScaleLayout.ROW_MAJOR:
        return (m, num_blocks(n)) if rowwise else (num_blocks(m), n)
    rows, blocks = (m, num_blocks(n)) if rowwise else (n, num_blocks(m))
    return (tiled_length(rows, blocks),)


def plan(
    x: Tensor, layout: Layout, fmt: Format, scales: ScaleLayout, target: Target
) -> tuple[Launch, tuple[Copy, ...]]:
    """The launch that makes the copies of `x` [M, N], any float dtype and strides, and the copies.

    The copies are allocated on x's device; `Layout.BOTH` gives rowwise, then columnwise.
    """
    m, n = x.shape
    wanted = (Layout.ROWWISE, Layout.COLUMNWISE) if layout is Layout.BOTH else (layout,)
    made = {
        kind: Copy(
            qdata=x.new_empty((m, n), dtype=fmt.elem.dtype),
            scale=x.new_empty(scale_shape(m, n, kind, scales), dtype=torch.uint8),
        )
        for kind in wanted
    }
    arguments: dict[str, Tensor | int | None] = {"x_ptr": x}
    for kind in (Layout.ROWWISE, Layout.COLUMNWISE):
        copy = made.get(kind)
        arguments[f"{kind}_ptr"] = None if copy is None else copy.qdata.view(torch.uint8)
        arguments[f"{kind}_scale_ptr"] = None if copy is None else copy.scale
    arguments |= {"M": m, "N": n, "stride_xm": x.stride(0), "stride_xn": x.stride(1)}
    config = chosen(QUANTIZE, "quantize", target).of(layout, x.element_size())
    square, tiled = fmt.tile == Tile.SQUARE, scales is ScaleLayout.TILED_128X4
    shortest = BLOCK if square or layout is not Layout.ROWWISE else 1
    block_m = power_of_two(m, shortest, config.block_m)
    block_n = power_of_two(n, BLOCK, config.block_n)
    padding = TILE_ROWS if tiled else 1
    tiles_m, tiles_n = (
        ceil_div(ceil_div(length, padding) * padding, block) for length, block in ((m, block_m), (n, block_n))
    )
    constants = {
        "ELEM": fmt.elem.name,
        "ROUNDING": fmt.derivation,
        "SQUARE": square,
        "TILED": tiled,
        "NATIVE": target.encodes_fp8,
        "PADDING": padding,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    launch = Launch(
        kernel=quantize_kernel,
        grid=(tiles_m * tiles_n,),
        arguments=arguments,
        constants=constants,
        options={"num_warps": config.num_warps},
    )
    return launch, tuple(made.values())


def quantize(x: Tensor, layout: Layout, fmt: Format, scales: ScaleLayout, target: Target) -> tuple[Copy, ...]:
    """The MX copies of `x` [M, N]: one, or rowwise then columnwise."""
    launch, copies = plan(x, layout, fmt, scales, target)
    launch.run()
    return copies
