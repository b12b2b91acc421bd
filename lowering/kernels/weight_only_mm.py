"""Weight-only matmul: stored weights against BF16 activations, for the few tokens of decoding.

    out[m, n] = Σ_k x[m, k] · w[n, k] · 2^(sw[n, k/32] − 127)  (+ bias[n])      MXFP8, MXFP4
    out[m, n] = Σ_k x[m, k] · w[n, k] · sw[n, k/16]                             NVFP4, sw in E4M3

A weight has half or a quarter of the bytes of BF16, and reading it is most of the time of a small product. x
is not quantized. ``templates.weight_only`` calls `sums`, which sums a span of K in one of two ways:

    gemv   in FP32 on the ALUs: one token, or activations that are not BF16
    dot    weights become BF16 in registers (exact from scale byte 3 on) and go to the tensor cores

A byte of E2M1 has the codes of an even k and of k + 1. The kernel adds two sums: low codes times even
elements of x, and high codes times odd elements.

If N has too few tiles for the chip, K is split too (``choices.weight_only_forms``). A second kernel
sums the parts, which are FP32 in memory, in a fixed order, so that the result does not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import fp4_values, tiles
from mxcompile.lowering.kernels.scaled_tile import packed

_RAISED = tl.constexpr(2.0**14)
"""Factor that turns `fp4_values.decoded` into values."""


@triton.constexpr_function
def _along(two_level):
    return 16 if two_level else 32


@triton.jit
def _scales(
    scale_ptr, column, start, N, K, stride_wsn, stride_wsk,
    NATIVE: tl.constexpr, TWO_LEVEL: tl.constexpr, WORDS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns FP32 scales [columns, blocks] from `start` on, a multiple of BLOCK_K; outside, bytes are 0.

    WORDS: whether each four scales of a column are an aligned word. The pipeline copies words ahead into
    shared memory, as it copies codes; it cannot copy bytes, and a step would wait for its loads.
    """
    ALONG: tl.constexpr = _along(TWO_LEVEL)
    BLOCKS: tl.constexpr = BLOCK_K // ALONG
    if WORDS and BLOCKS % 4 == 0:
        word = start // (4 * ALONG) + tl.arange(0, BLOCKS // 4)
        inside = (column < N)[:, None] & (word * (4 * ALONG) < K)[None, :]
        offset = column[:, None].to(tl.int64) * (stride_wsn // 4) + word[None, :]
        words = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        four = tl.load(words + offset, mask=inside, other=0)
        byte = (four[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]).to(tl.uint8)
        byte = tl.reshape(byte, (column.shape[0], BLOCKS))
    else:
        block = start // ALONG + tl.arange(0, BLOCKS)
        inside = (column < N)[:, None] & (block * ALONG < K)[None, :]
        offset = column[:, None].to(tl.int64) * stride_wsn + block[None, :].to(tl.int64) * stride_wsk
        byte = tl.load(scale_ptr + offset, mask=inside, other=0)
    return tiles.decode(byte, "e4m3", NATIVE) if TWO_LEVEL else tiles.scale_value(byte)


@triton.jit
def _codes(w_ptr, column, start, N, K, stride_wn, stride_wk, ELEM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the bytes [columns, …] of BLOCK_K codes from `start` on; 0 outside."""
    PER_BYTE: tl.constexpr = packed(ELEM)
    byte = start // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
    inside = (column < N)[:, None] & (byte < K // PER_BYTE)[None, :]
    offset = column[:, None].to(tl.int64) * stride_wn + byte[None, :].to(tl.int64) * stride_wk
    return tl.load(w_ptr + offset, mask=inside, other=0)


@triton.jit
def _blocks(values, scale):
    """Returns `values` [columns, …] as blocks that share the scales [columns, blocks]."""
    BLOCKS: tl.constexpr = scale.shape[1]
    return tl.reshape(values, (values.shape[0], BLOCKS, values.shape[1] // BLOCKS))


@triton.jit
def _scaled(values, scale):
    """Returns FP32 `values` [columns, …] times the scales of their blocks."""
    return tl.reshape(_blocks(values, scale) * scale[:, :, None], values.shape)


@triton.jit
def _pairs(codes, x, PTX: tl.constexpr):
    """Returns 2^-14 · the products of `codes` [columns, …] with x, summed over the two codes of each byte."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    low = fp4_values.decoded(codes, 0, PTX).to(tl.float32) * even[None, :]
    return low + fp4_values.decoded(codes, 1, PTX).to(tl.float32) * odd[None, :]


@triton.jit
def sums(
    x_ptr, w_ptr, w_scale_ptr, row, column, first, last, M, N, K,
    stride_xm, stride_xk, stride_wn, stride_wk, stride_wsn, stride_wsk,
    ELEM: tl.constexpr, NATIVE: tl.constexpr, TWO_LEVEL: tl.constexpr, WORDS: tl.constexpr,
    PTX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Returns FP32 sums over `first` ≤ k < `last`: [1, BLOCK_N], or [BLOCK_N, BLOCK_M] with DOT.

    first: a multiple of BLOCK_K. DOT: whether tensor cores multiply; weights are the rows of their product.
    """
    if DOT:
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        x_ptr += row.to(tl.int64) * stride_xm
        accumulator = tl.zeros((BLOCK_N, BLOCK_K // (_along(TWO_LEVEL) if ELEM == "e2m1" else 1)), tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        codes = _codes(w_ptr, column, start, N, K, stride_wn, stride_wk, ELEM, BLOCK_K)
        scale = _scales(
            w_scale_ptr, column, start, N, K, stride_wsn, stride_wsk, NATIVE, TWO_LEVEL, WORDS, BLOCK_K
        )
        k = start + tl.arange(0, BLOCK_K)
        if not DOT:
            x = tl.load(x_ptr + k.to(tl.int64) * stride_xk, mask=k < K, other=0.0).to(tl.float32)
            if ELEM == "e2m1":
                accumulator += tl.sum(_blocks(_pairs(codes, x, PTX), scale), 2) * scale * _RAISED
            else:
                accumulator += _scaled(tiles.decode(codes, ELEM, NATIVE), scale) * x[None, :]
        elif ELEM == "e2m1":
            x_ptrs = x_ptr + row[:, None].to(tl.int64) * stride_xm + k[None, :].to(tl.int64) * stride_xk
            x = tl.load(x_ptrs, mask=(row < M)[:, None] & (k < K)[None, :], other=0.0)
            even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
            factors = tl.broadcast_to(scale.to(tl.bfloat16)[:, :, None], _blocks(codes, scale).shape)
            factors = tl.reshape(factors, codes.shape)
            accumulator = tl.dot(fp4_values.times(codes, factors, 0, PTX), tl.trans(even), accumulator)
            accumulator = tl.dot(fp4_values.times(codes, factors, 1, PTX), tl.trans(odd), accumulator)
        else:
            x_ptrs = x_ptr + row[None, :].to(tl.int64) * stride_xm + k[:, None].to(tl.int64) * stride_xk
            x = tl.load(x_ptrs, mask=(row < M)[None, :] & (k < K)[:, None], other=0.0)
            w = _scaled(tiles.decode(codes, ELEM, NATIVE), scale)
            accumulator = tl.dot(w.to(tl.bfloat16), x, accumulator)
    return accumulator if DOT else tl.sum(accumulator, axis=1)[None, :]
