"""Scaled matmul: the product of two MX operands on the chip's block-scaled MMA.

    out[m, n] = Σ_k a[m, k] · 2^(sa[m, k/32] − 127) · b[k, n] · 2^(sb[k/32, n] − 127)  (+ bias[n])

FP32 accumulation, one rounding to the output dtype. Each operand may be stored K-major or MN-major, so that
fprop (x · wᵀ), dgrad (dy · w) and wgrad (dyᵀ · x) read what the cast wrote, with no transposed copy. Forms:

    pointers      any M, N, K and strides, scales row-major or tiled 128×4
    swapped       the same kernel on outᵀ = bᵀ · aᵀ: where the MMA's M side is 128 wide, few tokens belong on
                  its N side, which may be 16 wide
    tiled         ``scaled_mm_tiled``, for large aligned products on Blackwell

Only for chips with the instruction: elsewhere operands are dequantized and the vendor's BF16 GEMM is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxcompile.formats import elem_type
from mxcompile.lowering.kernels import tiles
from mxcompile.lowering.kernels.configs import SCALED_MM, MatmulConfig, chosen
from mxcompile.lowering.kernels.launch import Launch, ceil_div
from mxcompile.lowering.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One side of the product, seen as [rows, K]: the rows are M of `a`, N of `b`.

    qdata: FP8 [rows, K], any strides. scale: bytes [rows, ⌈K/32⌉], any strides, or flat and tiled 128×4.
    """

    qdata: Tensor
    scale: Tensor


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr = 8):
    """Row and column of tile number `pid`.

    They are walked in groups of GROUP rows of tiles: neighbours then share both operands in the cache.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % (GROUP * tiles_n) % rows, pid % (GROUP * tiles_n) // rows


@triton.jit
def store_tile(
    out_ptr,
    bias_ptr,
    accumulator,
    row,
    column,
    M,
    N,
    stride_om,
    stride_on,
    BIAS_ON_ROWS: tl.constexpr,
):
    """Add the bias, round once, store. row, column: of the tile's elements, int32."""
    if bias_ptr is not None:
        if BIAS_ON_ROWS:
            accumulator += tl.load(bias_ptr + row, mask=row < M, other=0.0).to(tl.float32)[:, None]
        else:
            accumulator += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None].to(tl.int64) * stride_om + column[None, :].to(tl.int64) * stride_on
    inside = (row[:, None] < M) & (column[None, :] < N)
    tl.store(out_ptr + offset, accumulator.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_offsets(row, block, num_blocks, stride_row, stride_block, TILED: tl.constexpr):
    """Where the bytes [rows, blocks] of an operand's scale lie. row, block: int32 vectors."""
    if TILED:
        offset = tiles.swizzled_offset(row[:, None], block[None, :], num_blocks)
    else:
        offset = row[:, None].to(tl.int64) * stride_row + block[None, :].to(tl.int64) * stride_block
    return offset


@triton.jit
def scaled_mm_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_asm,
    stride_ask,
    stride_bn,
    stride_bk,
    stride_bsn,
    stride_bsk,
    stride_om,
    stride_on,
    ELEM_A: tl.constexpr,
    ELEM_B: tl.constexpr,
    TILED: tl.constexpr,
    BIAS_ON_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out. a: codes [M, K], b: codes [N, K]; TILED: scales are; EVEN_K: BLOCK_K divides K."""
    BLOCKS: tl.constexpr = BLOCK_K // tiles.BLOCK
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCKS)
    a_ptrs = a_ptr + row[:, None].to(tl.int64) * stride_am + k[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + k[:, None].to(tl.int64) * stride_bk + column[None, :].to(tl.int64) * stride_bn
    in_m, in_n = (row < M)[:, None], column < N
    num_blocks = (K + tiles.BLOCK - 1) // tiles.BLOCK
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        blocks = start // tiles.BLOCK + block
        a_scale_ptrs = a_scale_ptr + scale_offsets(row, blocks, num_blocks, stride_asm, stride_ask, TILED)
        b_scale_ptrs = b_scale_ptr + scale_offsets(column, blocks, num_blocks, stride_bsn, stride_bsk, TILED)
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m, other=0)
            b = tl.load(b_ptrs, mask=in_n[None, :], other=0)
            a_scale = tl.load(a_scale_ptrs, mask=in_m, other=0)
            b_scale = tl.load(b_scale_ptrs, mask=in_n[:, None], other=0)
        else:
            in_k, in_block = k < K - start, (blocks < num_blocks)[None, :]
            a = tl.load(a_ptrs, mask=in_m & in_k[None, :], other=0)
            b = tl.load(b_ptrs, mask=in_k[:, None] & in_n[None, :], other=0)
            a_scale = tl.load(a_scale_ptrs, mask=in_m & in_block, other=0)
            b_scale = tl.load(b_scale_ptrs, mask=in_n[:, None] & in_block, other=0)
        accumulator = tl.dot_scaled(a, a_scale, ELEM_A, b, b_scale, ELEM_B, accumulator)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    store_tile(out_ptr, bias_ptr, accumulator, row, column, M, N, stride_om, stride_on, BIAS_ON_ROWS)


def plan(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target
) -> tuple[Launch, Tensor]:
    """The launch for few or for many rows of `a`, and its result [M, N], row-major.

    Raises `TargetError` where the target has no block-scaled MMA.
    """
    m, n = a.qdata.shape[0], b.qdata.shape[0]
    out = a.qdata.new_empty((m, n), dtype=out_dtype)
    choices = chosen(SCALED_MM, "scaled_mm", target)
    if m > choices.few_rows:
        return product(a, b, bias, out, choices.many, bias_on_rows=False), out
    if choices.swap_few:
        return product(b, a, bias, out.t(), choices.few, bias_on_rows=True), out
    return product(a, b, bias, out, choices.few, bias_on_rows=False), out


def product(
    a: Operand, b: Operand, bias: Tensor | None, out: Tensor, config: MatmulConfig, *, bias_on_rows: bool
) -> Launch:
    """The launch of the pointer form that writes a · bᵀ into `out` [M, N], any strides, with this config."""
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    tiled = a.scale.ndim == 1
    arguments: dict[str, Tensor | int | None] = {
        "a_ptr": a.qdata.view(torch.uint8),
        "a_scale_ptr": a.scale,
        "b_ptr": b.qdata.view(torch.uint8),
        "b_scale_ptr": b.scale,
        "bias_ptr": bias,
        "out_ptr": out,
        "M": m,
        "N": n,
        "K": k,
    }
    strided = {"am": a.qdata, "asm": a.scale, "bn": b.qdata, "bsn": b.scale}
    for name, tensor in strided.items():
        across, along = tensor.stride() if tensor.ndim == 2 else (0, 0)
        arguments |= {f"stride_{name}": across, f"stride_{name[:-1]}k": along}
    arguments |= {"stride_om": out.stride(0), "stride_on": out.stride(1)}
    return Launch(
        kernel=scaled_mm_kernel,
        grid=(ceil_div(m, config.block_m) * ceil_div(n, config.block_n),),
        arguments=arguments,
        constants={
            "ELEM_A": elem_type(a.qdata.dtype).name,
            "ELEM_B": elem_type(b.qdata.dtype).name,
            "TILED": tiled,
            "BIAS_ON_ROWS": bias_on_rows,
            "EVEN_K": k % config.block_k == 0,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )


def scaled_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target) -> Tensor:
    """A · bᵀ (+ bias [N]) as `out_dtype` [M, N]; see `plan`."""
    launch, out = plan(a, b, bias, out_dtype, target)
    launch.run()
    return out
