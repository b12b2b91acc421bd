"""Scale bytes in memory: Triton device functions that store scales of a cast and load scales of an operand.

    row-major     rowwise [M, ⌈N/32⌉], columnwise [⌈M/32⌉, N]
    tiled         ``mxcompile.formats.scale_tiles`` with M rows rowwise, N rows columnwise; padding is 0

Loads count K in bytes of elements. BLOCK bytes share a scale: 32 of MXFP8, 16 of MXFP4, and 8 of NVFP4, whose
scales are E4M3 instead of E8M0.

Whole tiles are loaded in the order of memory, 512 contiguous bytes each. The compiler turns load, reshape,
transposition and reshape into a copy from shared to tensor memory (`tcgen05.cp`), where the MMA reads scales
in this order. Parts of a tile are gathered. For an MMA that reads scales from registers, each row loads a
word, the 4 blocks of a tile: asynchronous copies need at least a word, and without them a step along K waits
for its loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import tiles


@triton.jit
def store(ptr, scale, row, block, rows, blocks, TILED: tl.constexpr):
    """Stores bytes at `row` and `block` of an operand with `rows` and `blocks`; padding of tiles is 0."""
    inside = (row < rows) & (block < blocks)
    if TILED:
        padded = (row < (rows + 127) // 128 * 128) & (block < (blocks + 3) // 4 * 4)
        tl.store(ptr + tiles.swizzled_offset(row, block, blocks), tl.where(inside, scale, 0), mask=padded)
    else:
        tl.store(ptr + row.to(tl.int64) * blocks + block, scale, mask=inside)


@triton.jit
def store_rowwise(ptr, scale, rows, blocks, M, N, TILED: tl.constexpr):
    """Stores bytes [rows, blocks] of a matrix [M, N] cast along N; if TILED, also zeros as padding."""
    num_blocks = (N + tiles.BLOCK - 1) // tiles.BLOCK
    store(ptr, scale, rows[:, None], blocks[None, :], M, num_blocks, TILED)


@triton.jit
def store_columnwise(ptr, scale, blocks, columns, M, N, TILED: tl.constexpr):
    """Stores bytes [blocks, columns] of a matrix [M, N] cast along M; if TILED, also zeros as padding."""
    num_blocks = (M + tiles.BLOCK - 1) // tiles.BLOCK
    block, column = blocks[:, None], columns[None, :]
    if TILED:
        inside = (column < (N + 127) // 128 * 128) & (block < (num_blocks + 3) // 4 * 4)
        scale = tl.where(column < N, scale, 0)
        tl.store(ptr + tiles.swizzled_offset(column, block, num_blocks), scale, mask=inside)
    else:
        tl.store(ptr + block.to(tl.int64) * N + column, scale, mask=(block < num_blocks) & (column < N))


@triton.jit
def from_tiles(tiled, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Returns bytes [DOWN · 128, ACROSS · 4] of tiles in the order of memory, of any shape."""
    return tiled.reshape(DOWN, ACROSS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(DOWN * 128, ACROSS * 4)


@triton.jit
def typed(ptr, BLOCK: tl.constexpr):
    """Returns `ptr` as a pointer to scales of the type that `tl.dot_scaled` reads: E4M3, or bytes of E8M0.

    Scales that become E4M3 only after the load would pass through registers on the way to tensor memory.
    """
    if BLOCK < 16:
        ptr = ptr.to(tl.pointer_type(tl.float8e4nv))
    return ptr


@triton.jit
def of_type(byte, BLOCK: tl.constexpr):
    """Returns scale bytes in registers as scales of the type in `typed`."""
    if BLOCK < 16:
        byte = byte.to(tl.float8e4nv, bitcast=True)
    return byte


@triton.jit
def load_words(
    ptr, first_row, step, rows, across, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr
):
    """Returns the bytes of `load_tiled`, by words of 4 blocks. ptr: aligned to words. across: tiles a row."""
    first = step * BLOCKS
    row = tl.arange(0, ROWS)
    ptr += ((first_row // 128).to(tl.int64) * across + first // 4) * 512
    index = tiles.swizzled_offset(first_row % 128 + row, 0, across * 4) // 4
    words = ptr.to(tl.pointer_type(tl.int32)) + index
    inside = first_row + row < tl.cdiv(rows, 128) * 128
    if BLOCKS <= 4:
        four = tl.load(words) if EVEN else tl.load(words, mask=inside & (first // 4 < across), other=0)
        byte = (four[:, None] >> (first % 4 + tl.arange(0, BLOCKS))[None, :] * 8).to(tl.uint8)
    else:
        tile = tl.arange(0, BLOCKS // 4)
        words = words[:, None] + tile[None, :] * 128
        if EVEN:
            four = tl.load(words)
        else:
            four = tl.load(words, mask=inside[:, None] & (first // 4 + tile < across)[None, :], other=0)
        byte = (four[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]).to(tl.uint8).reshape(ROWS, BLOCKS)
    return byte


@triton.jit
def load_tiled(
    ptr, first_row, step, rows, K,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr = tiles.BLOCK,
):  # fmt: skip
    """Returns scales [ROWS, BLOCKS] of tiled scales [rows, K / BLOCK], from `first_row` and step · BLOCKS on.

    first_row: a multiple of ROWS. Scales outside of the tiles are 0. EVEN: whether all are inside. WORDS:
    whether the MMA reads scales from registers.
    """
    across = tl.cdiv(K, 4 * BLOCK)
    if WORDS and (BLOCKS <= 4 or BLOCKS % 4 == 0):
        scale = of_type(load_words(ptr, first_row, step, rows, across, ROWS, BLOCKS, EVEN), BLOCK)
    elif ROWS % 128 == 0 and BLOCKS % 4 == 0:
        DOWN: tl.constexpr = ROWS // 128
        ACROSS: tl.constexpr = BLOCKS // 4
        down, byte = first_row // 128, tl.arange(0, ACROSS * 512)
        ptr = typed(ptr, BLOCK) + down.to(tl.int64) * across * 512 + step * (ACROSS * 512)
        offset = tl.arange(0, DOWN)[:, None] * across * 512 + byte[None, :]
        if EVEN or (DOWN == 1 and ACROSS == 1):  # a single tile has rows and blocks of the operand
            tiled = tl.load(ptr + offset)
        else:
            in_rows = (down + tl.arange(0, DOWN) < tl.cdiv(rows, 128))[:, None]
            in_blocks = (step * ACROSS + byte // 512 < across)[None, :]
            tiled = tl.load(ptr + offset, mask=in_rows & in_blocks, other=0.0)
        scale = from_tiles(tiled, DOWN, ACROSS)
    else:
        row, block = first_row + tl.arange(0, ROWS)[:, None], step * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        ptr = typed(ptr, BLOCK) + tiles.swizzled_offset(row, block, across * 4)
        if EVEN:
            scale = tl.load(ptr)
        else:
            inside = (row < tl.cdiv(rows, 128) * 128) & (block < across * 4)
            scale = tl.load(ptr, mask=inside, other=0.0)
    return scale


@triton.jit
def tiled_descriptor(
    ptr, rows, K, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr = tiles.BLOCK
):
    """Returns a descriptor of tiled scales [rows, K / BLOCK], for loads of [ROWS, BLOCKS], whole tiles."""
    down, across = tl.cdiv(rows, 128), tl.cdiv(K, 4 * BLOCK)
    width = across.to(tl.int64) * 512
    shape = [1, down, across, 2, 256]
    return tl.make_tensor_descriptor(
        typed(ptr, BLOCK), shape, [down * width, width, 512, 256, 1], [1, ROWS // 128, BLOCKS // 4, 2, 256]
    )
