"""Scaled matmul on tiled scales: `scaled_mm` for large products on chips with tensor memory.

The algebra of ``scaled_mm``. Scales come in the 128×4 tiled layout as the cast writes it, which the MMA takes
from shared memory (`tcgen05.cp`), and operands come through the tensor memory accelerator, which also fills
what lies outside with zeros. Persistent: a program per multiprocessor walks over the tiles of the result.

Wants what the accelerator wants: contiguous operands, K-major or MN-major, whose rows and the result's are
multiples of 16 bytes; `fits` says. The pointer form of ``scaled_mm``, which reads tiled scales too, takes the
rest. The padding bytes of the scales must be zero, as the cast leaves them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mxcompile.formats import BLOCK, elem_type
from mxcompile.formats.scale_tiles import TILE_BLOCKS, TILE_ROWS
from mxcompile.lowering.kernels import scale_bytes, tiles
from mxcompile.lowering.kernels.configs import tiled_configs
from mxcompile.lowering.kernels.launch import Launch, ceil_div
from mxcompile.lowering.kernels.scaled_mm import Operand, tile_of
from mxcompile.lowering.targets import Target

_ALIGNMENT = 16
"""Bytes: of the accelerator's strides."""


@triton.jit
def load_scale(desc, tile_row, tile_column, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Bytes [ROWS, BLOCKS], in the order of a row-major matrix, from a descriptor of tiles of 128×4."""
    return load_scale_at(desc, tile_row * (ROWS // 128), tile_column, ROWS, BLOCKS)


@triton.jit
def load_scale_at(desc, first, tile_column, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The same, from row of tiles `first` on."""
    DOWN: tl.constexpr = ROWS // 128
    ACROSS: tl.constexpr = BLOCKS // 4
    tiled = desc.load([0, first, tile_column * ACROSS, 0, 0])
    return scale_bytes.from_tiles(tiled, DOWN, ACROSS)


@triton.jit
def columns_of(x, HALVINGS: tl.constexpr):
    """`x` [H, W] as a tuple of 2^HALVINGS tensors, its columns in order."""
    if HALVINGS == 0:
        parts = (x,)
    else:
        H: tl.constexpr = x.shape[0]
        W: tl.constexpr = x.shape[1]
        left, right = x.reshape(H, 2, W // 2).permute(0, 2, 1).split()
        parts = columns_of(left, HALVINGS - 1) + columns_of(right, HALVINGS - 1)
    return parts


@triton.jit
def _store(out_desc, bias_ptr, accumulator, row, column, N, HALVINGS: tl.constexpr):
    """Add the bias to a tile, round, store, in 2^HALVINGS parts of its columns."""
    WIDTH: tl.constexpr = accumulator.shape[1] >> HALVINGS
    parts = columns_of(accumulator, HALVINGS)
    for index in tl.static_range(2**HALVINGS):
        part, start = parts[index], column + index * WIDTH
        if bias_ptr is not None:
            at = start + tl.arange(0, WIDTH)
            part += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
        out_desc.store([row, start], part.to(out_desc.dtype))


@triton.jit
def scaled_mm_tiled_kernel(
    a_desc,
    a_scale_desc,
    b_desc,
    b_scale_desc,
    bias_ptr,
    out_desc,
    M,
    N,
    K,
    PROGRAMS: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    ELEM_A: tl.constexpr,
    ELEM_B: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles of out, PROGRAMS apart. Descriptors of a: [M, K] or [K, M]; of b: [N, K] or [K, N]."""
    BLOCKS: tl.constexpr = BLOCK_K // tiles.BLOCK
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, warp_specialize=WARP_SPECIALIZE):
        pid_m, pid_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N)
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            a = a_desc.load([row, k]) if A_K_MAJOR else a_desc.load([k, row]).T
            b = b_desc.load([column, k]).T if B_K_MAJOR else b_desc.load([k, column])
            a_scale = load_scale(a_scale_desc, pid_m, step, BLOCK_M, BLOCKS)
            b_scale = load_scale(b_scale_desc, pid_n, step, BLOCK_N, BLOCKS)
            accumulator = tl.dot_scaled(a, a_scale, ELEM_A, b, b_scale, ELEM_B, accumulator)
        _store(out_desc, bias_ptr, accumulator, row, column, N, HALVINGS)


def _along(x: Tensor) -> int | None:
    """The dimension in which `x` [rows, K] is contiguous and the accelerator can read it, or None."""
    for dim in (1, 0):
        if x.stride(dim) == 1 and x.stride(1 - dim) * x.element_size() % _ALIGNMENT == 0:
            return dim
    return None


def fits(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    """Whether this form can run the product: tiled scales, aligned strides, nothing empty."""
    n = b.qdata.shape[0]
    operands = (a, b)
    return (
        all(operand.scale.ndim == 1 and _along(operand.qdata) is not None for operand in operands)
        and n * out_dtype.itemsize % _ALIGNMENT == 0
        and all(operand.qdata.numel() > 0 for operand in operands)
    )


def _descriptor(x: Tensor, rows: int, block_k: int) -> TensorDescriptor:
    """Of codes [rows, K], as [K, rows] where they are contiguous along the rows."""
    codes = x.view(torch.uint8)
    if _along(x) == 0:
        codes, block = codes.t(), [block_k, rows]
    else:
        block = [rows, block_k]
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), block)


def _scale_descriptor(scale: Tensor, rows: int, k: int, block_rows: int, block_k: int) -> TensorDescriptor:
    """Of tiled scale bytes, as [1, tile rows, tile columns, 2, 256]."""
    shape = [1, ceil_div(rows, TILE_ROWS), ceil_div(k, BLOCK * TILE_BLOCKS), 2, 256]
    strides = [shape[1] * shape[2] * 512, shape[2] * 512, 512, 256, 1]
    block = [1, block_rows // TILE_ROWS, block_k // (BLOCK * TILE_BLOCKS), 2, 256]
    return TensorDescriptor(scale, shape, strides, block)


def plan(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target, choice: int = 0
) -> tuple[Launch, Tensor]:
    """The launch of config number `choice` of the target's, and its result [M, N]; the product must fit.

    Raises `TargetError` where the target has no tensor memory.
    """
    config = tiled_configs(target)[choice]
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    out = a.qdata.new_empty((m, n), dtype=out_dtype)
    programs = min(target.processors, ceil_div(m, config.block_m) * ceil_div(n, config.block_n))
    launch = Launch(
        kernel=scaled_mm_tiled_kernel,
        grid=(programs,),
        arguments={
            "a_desc": _descriptor(a.qdata, config.block_m, config.block_k),
            "a_scale_desc": _scale_descriptor(a.scale, m, k, config.block_m, config.block_k),
            "b_desc": _descriptor(b.qdata, config.block_n, config.block_k),
            "b_scale_desc": _scale_descriptor(b.scale, n, k, config.block_n, config.block_k),
            "bias_ptr": bias,
            "out_desc": TensorDescriptor(
                out, [m, n], [n, 1], [config.block_m, config.block_n >> config.halvings]
            ),
            "M": m,
            "N": n,
            "K": k,
        },
        constants={
            "PROGRAMS": programs,
            "A_K_MAJOR": _along(a.qdata) == 1,
            "B_K_MAJOR": _along(b.qdata) == 1,
            "ELEM_A": elem_type(a.qdata.dtype).name,
            "ELEM_B": elem_type(b.qdata.dtype).name,
            "WARP_SPECIALIZE": config.warp_specialize,
            "HALVINGS": config.halvings,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return launch, out


def scaled_mm_tiled(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target
) -> Tensor:
    """A · bᵀ (+ bias [N]) as `out_dtype` [M, N], for operands that fit; see `plan`."""
    launch, out = plan(a, b, bias, out_dtype, target)
    launch.run()
    return out
