"""Fused quantize + matmul: a high-precision activation against an MX weight, in one kernel.

    out[m, n] = Σ_k dequantize(quantize(x))[m, k] · w[n, k] · 2^(sw[n, k/32] − 127)  (+ bias[n])

`x` is read as it is and quantized in registers inside the main loop, bit for bit as the cast would. That
saves writing and reading the FP8 copy but quantizes again for every tile of N: it pays for a narrow N, and
for few tokens, where the operands are swapped as in ``scaled_mm``. It leaves no copy behind: not for
activations that backward needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxcompile.formats import Format, Tile, elem_type
from mxcompile.lowering.kernels import tiles
from mxcompile.lowering.kernels.configs import FUSED_QUANTIZE_MM, chosen
from mxcompile.lowering.kernels.launch import Launch, ceil_div
from mxcompile.lowering.kernels.scaled_mm import Operand, scale_offsets, store_tile, tile_of
from mxcompile.lowering.targets import Target


@triton.jit
def fused_quantize_mm_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    stride_om,
    stride_on,
    ELEM_X: tl.constexpr,
    ELEM_W: tl.constexpr,
    ROUNDING: tl.constexpr,
    NATIVE: tl.constexpr,
    TILED: tl.constexpr,
    SWAPPED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out. x: [M, K]; w: codes [N, K]; SWAPPED: the accumulator is [N, M], w its rows."""
    BLOCKS: tl.constexpr = BLOCK_K // tiles.BLOCK
    pid_m, pid_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    row = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCKS)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * stride_xm + k[None, :].to(tl.int64) * stride_xk
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * stride_wn + k[None, :].to(tl.int64) * stride_wk
    in_m, in_n = (row < M)[:, None], (column < N)[:, None]
    num_blocks = (K + tiles.BLOCK - 1) // tiles.BLOCK
    if SWAPPED:
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        blocks = start // tiles.BLOCK + block
        w_scale_ptrs = w_scale_ptr + scale_offsets(column, blocks, num_blocks, stride_wsn, stride_wsk, TILED)
        if EVEN_K:
            x = tl.load(x_ptrs, mask=in_m, other=0.0)
            w = tl.load(w_ptrs, mask=in_n, other=0)
            w_scale = tl.load(w_scale_ptrs, mask=in_n, other=0)
        else:
            in_k = (k < K - start)[None, :]
            x = tl.load(x_ptrs, mask=in_m & in_k, other=0.0)
            w = tl.load(w_ptrs, mask=in_n & in_k, other=0)
            w_scale = tl.load(w_scale_ptrs, mask=in_n & (blocks < num_blocks)[None, :], other=0)
        codes, x_scale = tiles.quantize_rowwise(x, ELEM_X, ROUNDING, NATIVE)
        if SWAPPED:
            accumulator = tl.dot_scaled(w, w_scale, ELEM_W, tl.trans(codes), x_scale, ELEM_X, accumulator)
        else:
            accumulator = tl.dot_scaled(codes, x_scale, ELEM_X, tl.trans(w), w_scale, ELEM_W, accumulator)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    if SWAPPED:
        store_tile(out_ptr, bias_ptr, accumulator, column, row, N, M, stride_on, stride_om, True)
    else:
        store_tile(out_ptr, bias_ptr, accumulator, row, column, M, N, stride_om, stride_on, False)


def plan(
    x: Tensor, w: Operand, bias: Tensor | None, fmt: Format, out_dtype: torch.dtype, target: Target
) -> tuple[Launch, Tensor]:
    """The launch that multiplies `x` [M, K], quantized as `fmt`, by wᵀ, and its result [M, N], row-major.

    fmt: of one scale a row and block. Raises `TargetError` where the target has no block-scaled MMA.
    """
    assert fmt.tile == Tile.ROW, "squares of 32×32 are for weights, which this kernel takes quantized"
    (m, k), n = x.shape, w.qdata.shape[0]
    choices = chosen(FUSED_QUANTIZE_MM, "fused_quantize_mm", target)
    few = m <= choices.few_rows
    swapped = few and choices.swap_few
    config = choices.few if few else choices.many
    block_m, block_n = (config.block_n, config.block_m) if swapped else (config.block_m, config.block_n)
    out = x.new_empty((m, n), dtype=out_dtype)
    tiled = w.scale.ndim == 1
    stride_wsn, stride_wsk = (0, 0) if tiled else w.scale.stride()
    launch = Launch(
        kernel=fused_quantize_mm_kernel,
        grid=(ceil_div(m, block_m) * ceil_div(n, block_n),),
        arguments={
            "x_ptr": x,
            "w_ptr": w.qdata.view(torch.uint8),
            "w_scale_ptr": w.scale,
            "bias_ptr": bias,
            "out_ptr": out,
            "M": m,
            "N": n,
            "K": k,
            "stride_xm": x.stride(0),
            "stride_xk": x.stride(1),
            "stride_wn": w.qdata.stride(0),
            "stride_wk": w.qdata.stride(1),
            "stride_wsn": stride_wsn,
            "stride_wsk": stride_wsk,
            "stride_om": out.stride(0),
            "stride_on": out.stride(1),
        },
        constants={
            "ELEM_X": fmt.elem.name,
            "ELEM_W": elem_type(w.qdata.dtype).name,
            "ROUNDING": fmt.derivation,
            "NATIVE": target.encodes_fp8,
            "TILED": tiled,
            "SWAPPED": swapped,
            "EVEN_K": k % config.block_k == 0,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": config.block_k,
        },
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return launch, out


def fused_quantize_mm(
    x: Tensor, w: Operand, bias: Tensor | None, fmt: Format, out_dtype: torch.dtype, target: Target
) -> Tensor:
    """quantize(x) · wᵀ (+ bias [N]) as `out_dtype` [M, N]; see `plan`."""
    launch, out = plan(x, w, bias, fmt, out_dtype, target)
    launch.run()
    return out
