"""One tile of a product of MX operands, for batches of products and for groups of rows or of K.

    acc[m, n] = Σ_{begin ≤ k < end} a[m, k] · sa[m, k/B] · b[k, n] · sb[k/B, n]          in FP32

    MXFP8    one element a byte, blocks of 32, scales E8M0        2^(byte − 127)
    MXFP4    two elements a byte along K, the first in the low half, blocks of 32, scales E8M0
    NVFP4    the same, blocks of 16, scales E4M3

Blocks are counted from the start of K, even if `begin` or `end` lies inside a block. Codes outside the range
then count as 0, and the block keeps its scale. Scales are row-major bytes. The caller chooses rows, columns
and range, and stores the tile; `tile_of` defines the order of a product's tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.formats import ELEMENTS
from mxcompile.lowering.kernels import scale_bytes, tiles

CHUNK = tl.constexpr(16)
"""Bytes of packed codes under one mask, which one instruction loads."""


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the row and the column of tile number `pid`.

    Tiles are numbered by groups of GROUP rows of tiles, so that neighbours share both operands in the cache.
    """
    GROUP: tl.constexpr = 8
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % (GROUP * tiles_n) % rows, pid % (GROUP * tiles_n) // rows


@triton.constexpr_function
def packed(elem):
    """Returns how many elements of a type share a byte."""
    return ELEMENTS[elem].per_byte


@triton.jit
def tile_product(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row, column, in_m, in_n, begin, end, length,
    stride_am, stride_ak, stride_asm, stride_ask, stride_bk, stride_bn, stride_bsk, stride_bsn,
    ELEM_A: tl.constexpr, ELEM_B: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Returns FP32 [rows, columns] of a [M, K] · b [K, N], codes with any strides; scales [M, K/B], [K/B, N].

    row, column: the tile's rows and columns, in the integer type of offsets. in_m, in_n: whether these are in
    the matrix. begin, end: elements of K. length: bytes of K. BLOCK: bytes that share a scale. BLOCK_K: bytes
    of a step. WHOLE_K: whether begin is 0, end is all of K, and BLOCK_K divides length. SPAN: whether begin
    and end may be anywhere; else the range is all of K, or empty.

    For packed elements with SPAN the loop reads whole chunks, and a last step reads the chunks that other
    groups share. So no load is narrower than a chunk, and only the last step masks codes within bytes.
    """
    PACK: tl.constexpr = packed(ELEM_A)
    CHUNKS: tl.constexpr = SPAN and PACK > 1
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    rk, rs = tl.arange(0, BLOCK_K), tl.arange(0, BLOCKS)
    first, low, high = begin // BLOCK * BLOCK, begin, end
    if PACK > 1:
        first, low, high = 0, 0, tl.where(begin < end, length, 0)
    if CHUNKS:
        low, high = tl.cdiv(begin, 2 * CHUNK) * CHUNK, end // (2 * CHUNK) * CHUNK
        first = low // BLOCK_K * BLOCK_K
    a_ptrs, b_ptrs, a_scales, b_scales = _pointers(
        a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row, column, first + rk, first // BLOCK + rs,
        stride_am, stride_ak, stride_asm, stride_ask, stride_bk, stride_bn, stride_bsk, stride_bsn,
    )  # fmt: skip
    acc = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(first, high, BLOCK_K):
        a, b, a_scale, b_scale = _loaded(
            a_ptrs, b_ptrs, a_scales, b_scales, in_m, in_n, start + rk, start + rs * BLOCK, low, high, length,
            WHOLE_K, CHUNKS,
        )  # fmt: skip
        a_scale, b_scale = scale_bytes.of_type(a_scale, BLOCK), scale_bytes.of_type(b_scale, BLOCK)
        acc = tl.dot_scaled(a, a_scale, ELEM_A, b, b_scale, ELEM_B, acc)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
        a_scales += BLOCKS * stride_ask
        b_scales += BLOCKS * stride_bsk
    if CHUNKS:
        byte, block, bits = _ends(begin, end, BLOCK)
        in_k, in_block = (bits > 0) & (byte < length), (block >= 0) & (block * BLOCK < length)
        a_ptrs, b_ptrs, a_scales, b_scales = _pointers(
            a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row, column, byte, block,
            stride_am, stride_ak, stride_asm, stride_ask, stride_bk, stride_bn, stride_bsk, stride_bsn,
        )  # fmt: skip
        a, b, a_scale, b_scale = _masked(a_ptrs, b_ptrs, a_scales, b_scales, in_m, in_n, in_k, in_block)
        a = a & bits.to(tl.uint8)[None, :]
        a_scale, b_scale = scale_bytes.of_type(a_scale, BLOCK), scale_bytes.of_type(b_scale, BLOCK)
        acc = tl.dot_scaled(a, a_scale, ELEM_A, b, b_scale, ELEM_B, acc)
    return acc


@triton.jit
def _pointers(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, row, column, k, block,
    stride_am, stride_ak, stride_asm, stride_ask, stride_bk, stride_bn, stride_bsk, stride_bsn,
):  # fmt: skip
    """Returns pointers to codes of a and b at bytes `k` of K, and to the scales of `block`, for a tile."""
    k, block = k.to(row.dtype), block.to(row.dtype)
    a = a_ptr + row[:, None] * stride_am + k[None, :] * stride_ak
    b = b_ptr + k[:, None] * stride_bk + column[None, :] * stride_bn
    a_scale = a_scale_ptr + row[:, None] * stride_asm + block[None, :] * stride_ask
    b_scale = b_scale_ptr + column[:, None] * stride_bsn + block[None, :] * stride_bsk
    return a, b, a_scale, b_scale


@triton.jit
def _loaded(
    a_ptrs, b_ptrs, a_scales, b_scales, in_m, in_n, k, block_start, low, high, length,
    WHOLE_K: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Returns codes of a and b at bytes `k`, and scales of blocks that start at bytes `block_start`.

    Outside of `low` to `high`, codes are 0; with CHUNKS, scales too.
    """
    if WHOLE_K:
        a = tl.load(a_ptrs, mask=in_m[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=in_n[None, :], other=0.0)
        a_scale = tl.load(a_scales, mask=in_m[:, None], other=0)
        b_scale = tl.load(b_scales, mask=in_n[:, None], other=0)
    else:
        in_k = (k < high) & (k >= low)
        in_block = block_start < high
        if CHUNKS:  # whole chunks, so that a thread's load has one mask
            in_k = (k // CHUNK >= low // CHUNK) & (k // CHUNK < high // CHUNK)
            in_block = block_start < length
        a, b, a_scale, b_scale = _masked(a_ptrs, b_ptrs, a_scales, b_scales, in_m, in_n, in_k, in_block)
        if CHUNKS:  # a scale of another group may be NaN, which a code of 0 does not remove
            ours = ((block_start >= low) & (block_start < high))[None, :]
            a_scale, b_scale = tl.where(ours, a_scale, 0), tl.where(ours, b_scale, 0)
    return a, b, a_scale, b_scale


@triton.jit
def _masked(a_ptrs, b_ptrs, a_scales, b_scales, in_m, in_n, in_k, in_block):
    """Returns codes of a and b, and their scales; 0 outside of the masks."""
    a = tl.load(a_ptrs, mask=in_m[:, None] & in_k[None, :], other=0.0)
    b = tl.load(b_ptrs, mask=in_k[:, None] & in_n[None, :], other=0.0)
    a_scale = tl.load(a_scales, mask=in_m[:, None] & in_block[None, :], other=0)
    b_scale = tl.load(b_scales, mask=in_n[:, None] & in_block[None, :], other=0)
    return a, b, a_scale, b_scale


@triton.jit
def _ends(begin, end, BLOCK: tl.constexpr):
    """Finds the chunks of K, at most two, that packed elements from `begin` to `end` share with other groups.

    Returns their bytes, their blocks (−1 if a chunk does not exist), and masks of the codes in the range.
    """
    position, block = tl.arange(0, 2 * CHUNK), tl.arange(0, 2 * CHUNK // BLOCK)
    head, tail = begin // (2 * CHUNK), end // (2 * CHUNK)
    has_head = (begin % (2 * CHUNK) > 0) & (begin < end)
    has_tail = (end % (2 * CHUNK) > 0) & ((tail != head) | (begin % (2 * CHUNK) == 0)) & (begin < end)
    byte = tl.where(position < CHUNK, head * CHUNK + position, tail * CHUNK + position - CHUNK)
    there = tl.where(position < CHUNK, has_head, has_tail)
    low, high = 2 * byte, 2 * byte + 1
    bits = tl.where((low >= begin) & (low < end), 0x0F, 0) | tl.where((high >= begin) & (high < end), 0xF0, 0)
    PER: tl.constexpr = CHUNK // BLOCK
    of_chunk = tl.where(block < PER, head * PER + block, tail * PER + block - PER)
    of_chunk = tl.where(tl.where(block < PER, has_head, has_tail), of_chunk, -1)
    return byte, of_chunk, tl.where(there, bits, 0)


@triton.jit
def factor(ptr, index, stride, end, SHARED: tl.constexpr):
    """Returns a tensor's FP32 scales for rows or columns `index` of a result; a single number if SHARED."""
    if SHARED:
        scale = tl.load(ptr)
    else:
        scale = tl.load(ptr + index.to(tl.int64) * stride, mask=index < end, other=0.0)
    return scale


@triton.jit
def group_of(offs_ptr, tile, M, NUM_GROUPS: tl.constexpr, POWER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the group of row tile number `tile`, the first row of the tile, and the end of the group.

    offs: ends of the groups, int32 [NUM_GROUPS], not decreasing, at most M. Tiles do not cross groups; the
    last tile of a group may be short. Rows past the last group form group NUM_GROUPS. It also has the tiles
    past all rows, which are empty. POWER: a power of two greater than NUM_GROUPS.
    """
    index = tl.arange(0, POWER)
    ends = tl.load(offs_ptr + index, mask=index < NUM_GROUPS, other=0).to(tl.int32)
    ends = tl.where(index < NUM_GROUPS, ends, M)
    starts = tl.load(offs_ptr + index - 1, mask=(index > 0) & (index <= NUM_GROUPS), other=0).to(tl.int32)
    starts = tl.where(index > NUM_GROUPS, M, starts)
    tiles_ = (ends - starts + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles_, 0)
    group = tl.minimum(tl.sum((before <= tile).to(tl.int32), 0), NUM_GROUPS)
    mine = index == group
    first = tl.sum(tl.where(mine, before - tiles_, 0), 0)
    start = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return group, start + (tile - first) * BLOCK_M, end


@triton.jit
def blocks_of(offs_ptr, NUM_GROUPS: tl.constexpr, POWER: tl.constexpr):
    """Returns first block, end block and end scale tile of each group of K, [POWER] each. A tile is 4 blocks.

    Tiles are in the order of groups and do not cross groups; a block that two groups share is in tiles of
    both.
    """
    index = tl.arange(0, POWER)
    inside = index < NUM_GROUPS
    ends = tl.load(offs_ptr + index, mask=inside, other=0).to(tl.int32)
    starts = tl.load(offs_ptr + index - 1, mask=inside & (index > 0), other=0).to(tl.int32)
    first, last = starts // tiles.BLOCK, (ends + tiles.BLOCK - 1) // tiles.BLOCK
    return first, last, tl.cumsum(tl.where(starts < ends, (last - first + 3) // 4, 0), 0)


@triton.jit
def span_of(offs_ptr, group, NUM_GROUPS: tl.constexpr, POWER: tl.constexpr):
    """Returns where group number `group` of K begins and ends, and its first scale tile."""
    begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0).to(tl.int32)
    end = tl.load(offs_ptr + group).to(tl.int32)
    _, _, tile_ends = blocks_of(offs_ptr, NUM_GROUPS, POWER)
    before = tl.where(tl.arange(0, POWER) == group - 1, tile_ends, 0)
    return begin, end, tl.sum(before, 0)


@triton.jit
def scale_tile_of(offs_ptr, tile, NUM_GROUPS: tl.constexpr, POWER: tl.constexpr):
    """Returns first and end block of scale tile number `tile` along K; 0 and 0 past the last tile."""
    first, last, tile_ends = blocks_of(offs_ptr, NUM_GROUPS, POWER)
    index = tl.arange(0, POWER)
    group = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    mine = index == group
    before = tl.sum(tl.where(index == group - 1, tile_ends, 0), 0)
    begin = tl.sum(tl.where(mine, first, 0), 0) + (tile - before) * 4
    return begin, tl.sum(tl.where(mine, last, 0), 0)
