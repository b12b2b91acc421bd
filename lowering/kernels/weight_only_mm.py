"""Weight-only matmul: MX weights against BF16 activations, for the few tokens of decoding.

    out[m, n] = Σ_k x[m, k] · w[n, k] · 2^(sw[n, k/32] − 127)  (+ bias[n])

Half the bytes of a BF16 weight, and bytes are the time of a small product. Nothing of x is quantized. Forms:

    gemv   in FP32 on the ALUs: one token, or activations that are not BF16
    dot    weights become BF16 in registers (exact from scale byte 3 on) and go to the tensor cores

Where the tiles of N are too few for the chip, K is split too; the parts are written out in FP32 and summed in
a fixed order by a second kernel, so that a result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mxcompile.formats import elem_type
from mxcompile.lowering.kernels import tiles
from mxcompile.lowering.kernels.configs import WEIGHT_ONLY_MM, MatmulConfig, chosen
from mxcompile.lowering.kernels.launch import Launch, ceil_div
from mxcompile.lowering.kernels.scaled_mm import Operand, store_tile
from mxcompile.lowering.targets import Target

_REDUCE_BLOCK = 1024
_PROGRAMS_PER_PROCESSOR = 2
"""K is split until there are so many programs for every multiprocessor."""


@triton.jit
def _weights(
    w_ptr,
    w_scale_ptr,
    column,
    start,
    N,
    K,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    ELEM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """FP32 weights [columns, BLOCK_K] from `start`, a multiple of 32, on; zero outside."""
    k = start + tl.arange(0, BLOCK_K)
    block = start // tiles.BLOCK + tl.arange(0, BLOCK_K // tiles.BLOCK)
    inside, column64 = (column < N)[:, None], column[:, None].to(tl.int64)
    w_offset = column64 * stride_wn + k[None, :].to(tl.int64) * stride_wk
    scale_offset = column64 * stride_wsn + block[None, :].to(tl.int64) * stride_wsk
    in_block = (block * tiles.BLOCK < K)[None, :]
    codes = tl.load(w_ptr + w_offset, mask=inside & (k < K)[None, :], other=0)
    scale = tl.load(w_scale_ptr + scale_offset, mask=inside & in_block, other=0)
    return tiles.dequantize_rowwise(codes, scale, ELEM, NATIVE)


@triton.jit
def gemv_sums(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    row,
    column,
    first,
    last,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    ELEM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """FP32 [1, BLOCK_N] of one row of x: Σ over `first` ≤ k < `last`, `first` a multiple of 32."""
    x_ptr += row.to(tl.int64) * stride_xm
    accumulator = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        w = _weights(
            w_ptr,
            w_scale_ptr,
            column,
            start,
            N,
            K,
            stride_wn,
            stride_wk,
            stride_wsn,
            stride_wsk,
            ELEM,
            NATIVE,
            BLOCK_K,
        )
        x = tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0).to(tl.float32)
        accumulator += w * x[None, :]
    return tl.sum(accumulator, axis=1)[None, :]


@triton.jit
def dot_sums(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    row,
    column,
    first,
    last,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    ELEM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """FP32 [BLOCK_N, BLOCK_M], as `gemv_sums`: the weights as rows of a tensor core product."""
    accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + row[None, :].to(tl.int64) * stride_xm + k[:, None].to(tl.int64) * stride_xk
        x = tl.load(x_ptrs, mask=(row < M)[None, :] & (k < K)[:, None], other=0.0)
        w = _weights(
            w_ptr,
            w_scale_ptr,
            column,
            start,
            N,
            K,
            stride_wn,
            stride_wk,
            stride_wsn,
            stride_wsk,
            ELEM,
            NATIVE,
            BLOCK_K,
        )
        accumulator = tl.dot(w.to(tl.bfloat16), x, accumulator)
    return accumulator


@triton.jit
def weight_only_gemv_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    SPAN,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    stride_om,
    stride_on,
    ELEM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Columns (program 0) of a row (1) of a part (2) of out [parts, M, N]; a part is SPAN of K."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, part = tl.program_id(1), tl.program_id(2)
    out = gemv_sums(
        x_ptr,
        w_ptr,
        w_scale_ptr,
        row,
        column,
        part * SPAN,
        tl.minimum(K, part * SPAN + SPAN),
        N,
        K,
        stride_xm,
        stride_xk,
        stride_wn,
        stride_wk,
        stride_wsn,
        stride_wsk,
        ELEM,
        NATIVE,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    out_ptr += (part.to(tl.int64) * M + row) * N
    store_tile(out_ptr, bias_ptr, out, tl.zeros((1,), tl.int32), column, 1, N, stride_om, stride_on, False)


@triton.jit
def weight_only_dot_kernel(
    x_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    SPAN,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_wsn,
    stride_wsk,
    stride_om,
    stride_on,
    ELEM: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `weight_only_gemv_kernel`, BLOCK_M rows at a time."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    out = dot_sums(
        x_ptr,
        w_ptr,
        w_scale_ptr,
        row,
        column,
        part * SPAN,
        tl.minimum(K, part * SPAN + SPAN),
        M,
        N,
        K,
        stride_xm,
        stride_xk,
        stride_wn,
        stride_wk,
        stride_wsn,
        stride_wsk,
        ELEM,
        NATIVE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
    )
    out_ptr += part.to(tl.int64) * M * N
    store_tile(out_ptr, bias_ptr, out, column, row, N, M, stride_on, stride_om, True)


@triton.jit
def weight_only_reduce_kernel(
    partial_ptr, bias_ptr, out_ptr, SIZE, N, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Out = Σ partial [PARTS, SIZE], in order, + bias[i mod N], rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(partial_ptr + part * SIZE.to(tl.int64) + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def split(m: int, n: int, k: int, config: MatmulConfig, target: Target) -> tuple[int, int]:
    """Into how many parts K is split, and the length of one, a multiple of block_k."""
    programs = ceil_div(m, config.block_m) * ceil_div(n, config.block_n)
    steps = ceil_div(k, config.block_k)
    wanted = ceil_div(_PROGRAMS_PER_PROCESSOR * target.processors, max(programs, 1))
    span = ceil_div(steps, max(1, min(wanted, steps // 2)))  # a part takes at least two steps
    return max(1, ceil_div(steps, max(span, 1))), max(span, 1) * config.block_k


def plan(
    x: Tensor, w: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target
) -> tuple[tuple[Launch, ...], Tensor]:
    """The launches that multiply `x` [M, K] by wᵀ, and the result [M, N], row-major.

    x: BF16, FP16 or FP32, any strides. w: scales row-major. Raises `TargetError` for a target without a row.
    """
    (m, k), n = x.shape, w.qdata.shape[0]
    choices = chosen(WEIGHT_ONLY_MM, "weight_only_mm", target)
    on_tensor_cores = x.dtype is torch.bfloat16 and m > 1
    blocks = {"BLOCK_M": choices.dot.block_m} if on_tensor_cores else {}
    config = choices.dot if on_tensor_cores else choices.gemv
    parts, span = split(m, n, k, config, target)
    out = x.new_empty((m, n), dtype=out_dtype)
    partial = out if parts == 1 else x.new_empty((parts, m, n), dtype=torch.float32)
    product = Launch(
        kernel=weight_only_dot_kernel if on_tensor_cores else weight_only_gemv_kernel,
        grid=(ceil_div(n, config.block_n), ceil_div(m, config.block_m), parts),
        arguments={
            "x_ptr": x,
            "w_ptr": w.qdata.view(torch.uint8),
            "w_scale_ptr": w.scale,
            "bias_ptr": bias if parts == 1 else None,
            "out_ptr": partial,
            "M": m,
            "N": n,
            "K": k,
            "SPAN": span,
            "stride_xm": x.stride(0),
            "stride_xk": x.stride(1),
            "stride_wn": w.qdata.stride(0),
            "stride_wk": w.qdata.stride(1),
            "stride_wsn": w.scale.stride(0),
            "stride_wsk": w.scale.stride(1),
            "stride_om": n,
            "stride_on": 1,
        },
        constants={
            "ELEM": elem_type(w.qdata.dtype).name,
            "NATIVE": target.decodes_fp8,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.num_stages,
        }
        | blocks,
        options={"num_warps": config.num_warps},
    )
    if parts == 1:
        return (product,), out
    reduce = Launch(
        kernel=weight_only_reduce_kernel,
        grid=(ceil_div(m * n, _REDUCE_BLOCK),),
        arguments={"partial_ptr": partial, "bias_ptr": bias, "out_ptr": out, "SIZE": m * n, "N": n},
        constants={"PARTS": parts, "BLOCK": _REDUCE_BLOCK},
        options={"num_warps": 4},
    )
    return (product, reduce), out


def weight_only_mm(
    x: Tensor, w: Operand, bias: Tensor | None, out_dtype: torch.dtype, target: Target
) -> Tensor:
    """X · wᵀ (+ bias [N]) as `out_dtype` [M, N]; see `plan`."""
    launches, out = plan(x, w, bias, out_dtype, target)
    for launch in launches:
        launch.run()
    return out
