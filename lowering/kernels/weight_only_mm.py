"""Weight-only matmul: MX weights against BF16 activations, for the few tokens of decoding.

    out[m, n] = Σ_k x[m, k] · w[n, k] · 2^(sw[n, k/32] − 127)  (+ bias[n])

Half the bytes of a BF16 weight, and bytes are the time of a small product. Nothing of x is quantized. The
device functions of ``templates.weight_only``, each of which sums a span of K:

    gemv   in FP32 on the ALUs: one token, or activations that are not BF16
    dot    weights become BF16 in registers (exact from scale byte 3 on) and go to the tensor cores

Where the tiles of N are too few for the chip, K is split too (`templates.weight_only_forms.split`). The parts
are written out in FP32 and summed in a fixed order by a second kernel, so that a result does not depend on
timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import tiles


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
