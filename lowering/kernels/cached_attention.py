"""Attention of few queries over a part of a cache's keys and values, decoded from MXFP8 in registers.

    s[r, t] = factor · Σ_d q[r, d] · k[t, d] + mask[r, t]        top = max_t s,  sum = Σ_t e^(s − top)
                                                                 total[r, d] = Σ_t e^(s − top) · v[t, d]

Rows r are the queries of all heads that share a head of keys and values, so that they share each byte read.
A part takes every PARTS-th tile of keys: a static cache fills from the front, so contiguous parts would have
unequal work. Keys that the mask excludes for every row are not read. Keys, values and e^(s − top) become BF16
for the tensor cores (keys and values exactly, from scale byte 3 on); sums are in FP32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import tiles


@triton.jit
def _values(codes_ptr, scale_ptr, key, dim, live, D, ELEM: tl.constexpr, NATIVE: tl.constexpr):
    """Returns the dequantized rows `key`, BF16 [keys, BLOCK_D]; 0 past D, and in rows that are not `live`."""
    blocks = tl.cdiv(D, tiles.BLOCK)
    block = tl.arange(0, dim.shape[0] // tiles.BLOCK)
    codes = tl.load(
        codes_ptr + key[:, None] * D + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0
    )
    scale = tl.load(
        scale_ptr + key[:, None] * blocks + block[None, :],
        mask=live[:, None] & (block < blocks)[None, :],
        other=0,
    )
    return tiles.dequantize_rowwise(codes, scale, ELEM, NATIVE).to(tl.bfloat16)


@triton.jit
def attend(
    q, keys_ptr, key_scale_ptr, values_ptr, value_scale_ptr, mask_ptr, mask_offset, stride_mask,
    in_rows, dim, factor, part, T, D,
    ELEM: tl.constexpr, NATIVE: tl.constexpr, MASKED: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns FP32 total [rows, BLOCK_D], top [rows] and sum [rows] of part number `part` of T keys.

    q: BF16 [rows, BLOCK_D], zero past D. Pointers to keys, values and scales: first byte of a head.
    mask_offset: [rows], start of each row's mask. in_rows: [rows], whether a row is a query. dim: 0 to
    BLOCK_D − 1.
    """
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    weight = tl.zeros((q.shape[0],), tl.float32)
    total = tl.zeros((q.shape[0], dim.shape[0]), tl.float32)
    for start in tl.range(part * TILE, T, PARTS * TILE, num_stages=STAGES):
        key = (start + tl.arange(0, TILE)).to(tl.int64)
        there = in_rows[:, None] & (key < T)[None, :]
        if MASKED:
            places = mask_ptr + mask_offset[:, None] + key[None, :] * stride_mask
            added = tl.load(places, mask=there, other=float("-inf")).to(tl.float32)
        else:
            added = tl.where(there, 0.0, float("-inf"))
        live = tl.max((added != float("-inf")).to(tl.int32), axis=0) > 0
        k = _values(keys_ptr, key_scale_ptr, key, dim, live, D, ELEM, NATIVE)
        scores = tl.dot(q, tl.trans(k)) * factor + added
        before = top
        top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)  # a row without keys so far: −∞ − −∞ would be NaN
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(before - base)
        weight = weight * kept + tl.sum(weights, axis=1)
        v = _values(values_ptr, value_scale_ptr, key, dim, live, D, ELEM, NATIVE)
        total = tl.dot(weights.to(tl.bfloat16), v, total * kept[:, None])
    return total, top, weight
