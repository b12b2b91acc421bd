"""Scale bytes in memory: Triton device functions that store those of a cast and load those of an operand.

    row-major     rowwise [M, ⌈N/32⌉], columnwise [⌈M/32⌉, N]
    tiled         ``mxcompile.formats.scale_tiles``, of rows M rowwise and N columnwise; what is padded is 0

Whole tiles are loaded as the bytes lie, a tile in 512 neighbours, and put in order in registers' terms only:
the compiler turns load, reshape, transposition and reshape into a copy from shared to tensor memory
(`tcgen05.cp`), which is the order the MMA reads. Parts of a tile are gathered. An MMA that reads scales from
registers has a word loaded for each row, the 4 blocks of a tile: of less than a word there is no asynchronous
copy, and a step along K would wait for what it loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import tiles


@triton.jit
def store(ptr, scale, row, block, rows, blocks, TILED: tl.constexpr):
    """Store bytes at `row` and `block` of an operand of so many rows and blocks; padding of tiles is 0."""
    inside = (row < rows) & (block < blocks)
    if TILED:
        padded = (row < (rows + 127) // 128 * 128) & (block < (blocks + 3) // 4 * 4)
        tl.store(ptr + tiles.swizzled_offset(row, block, blocks), tl.where(inside, scale, 0), mask=padded)
    else:
        tl.store(ptr + row.to(tl.int64) * blocks + block, scale, mask=inside)


@triton.jit
def store_rowwise(ptr, scale, rows, blocks, M, N, TILED: tl.constexpr):
    """Store bytes [rows, blocks] of a matrix [M, N] cast along N; tiled, those of padding as 0."""
    num_blocks = (N + tiles.BLOCK - 1) // tiles.BLOCK
    store(ptr, scale, rows[:, None], blocks[None, :], M, num_blocks, TILED)


@triton.jit
def store_columnwise(ptr, scale, blocks, columns, M, N, TILED: tl.constexpr):
    """Store bytes [blocks, columns] of a matrix [M, N] cast along M; tiled, those of padding as 0."""
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
    """Bytes [DOWN · 128, ACROSS · 4] of tiles in the order they have in memory, of any shape."""
    return tiled.reshape(DOWN, ACROSS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(DOWN * 128, ACROSS * 4)


@triton.jit
def load_words(ptr, first_row, step, rows, K, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """The same as `load_tiled`, of 4 blocks at most, by a word a row. ptr: a multiple of 4 bytes."""
    across, first = tl.cdiv(K, 128), step * BLOCKS
    row = tl.arange(0, ROWS)
    ptr += ((first_row // 128).to(tl.int64) * across + first // 4) * 512
    place = tiles.swizzled_offset(first_row % 128 + row, 0, across * 4) // 4
    words = ptr.to(tl.pointer_type(tl.int32)) + place
    if EVEN:
        four = tl.load(words)
    else:
        inside = (first_row + row < tl.cdiv(rows, 128) * 128) & (first // 4 < across)
        four = tl.load(words, mask=inside, other=0)
    return (four[:, None] >> (first % 4 + tl.arange(0, BLOCKS))[None, :] * 8).to(tl.uint8)


@triton.jit
def load_tiled(
    ptr,
    first_row,
    step,
    rows,
    K,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Bytes [ROWS, BLOCKS] of a tiled scale of [rows, K / 32], from `first_row` and block step · BLOCKS on.

    first_row: a multiple of ROWS. What is outside the tiles is 0. EVEN: nothing is. WORDS: whether the MMA
    reads them from registers.
    """
    across = tl.cdiv(K, 128)
    if WORDS and BLOCKS <= 4:
        scale = load_words(ptr, first_row, step, rows, K, ROWS, BLOCKS, EVEN)
    elif ROWS % 128 == 0 and BLOCKS % 4 == 0:
        DOWN: tl.constexpr = ROWS // 128
        ACROSS: tl.constexpr = BLOCKS // 4
        down, place = first_row // 128, tl.arange(0, ACROSS * 512)
        ptr += down.to(tl.int64) * across * 512 + step * (ACROSS * 512)
        offset = tl.arange(0, DOWN)[:, None] * across * 512 + place[None, :]
        if EVEN or (DOWN == 1 and ACROSS == 1):
            tiled = tl.load(ptr + offset)
        else:
            in_rows = (down + tl.arange(0, DOWN) < tl.cdiv(rows, 128))[:, None]
            in_blocks = (step * ACROSS + place // 512 < across)[None, :]
            tiled = tl.load(ptr + offset, mask=in_rows & in_blocks, other=0)
        scale = from_tiles(tiled, DOWN, ACROSS)
    else:
        row, block = first_row + tl.arange(0, ROWS)[:, None], step * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        offset = tiles.swizzled_offset(row, block, across * 4)
        if EVEN:
            scale = tl.load(ptr + offset)
        else:
            inside = (row < tl.cdiv(rows, 128) * 128) & (block < across * 4)
            scale = tl.load(ptr + offset, mask=inside, other=0)
    return scale


@triton.jit
def tiled_descriptor(ptr, rows, K, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """A descriptor of a tiled scale of [rows, K / 32], for loads of [ROWS, BLOCKS], whole tiles."""
    down, across = tl.cdiv(rows, 128), tl.cdiv(K, 128)
    width = across.to(tl.int64) * 512
    shape = [1, down, across, 2, 256]
    return tl.make_tensor_descriptor(
        ptr, shape, [down * width, width, 512, 256, 1], [1, ROWS // 128, BLOCKS // 4, 2, 256]
    )
