"""The 128×4 tiled layout of scale bytes, which Blackwell's block-scaled MMA reads.

    tiles of 128 rows by 4 blocks, 512 bytes each, row-major among themselves:
    byte(r, c) of [rows, blocks] lies at  (r ÷ 128 · ⌈blocks/4⌉ + c ÷ 4) · 512
                                          + r mod 32 · 16 + r mod 128 ÷ 32 · 4 + c mod 4

The rows are those of the operand in the GEMM, M of `a` and N of `b`, and the blocks lie along K, whatever the
dimension of the matrix in memory they were cast along. A tiled scale is a vector, so it has no transpose. Its
length is a whole number of tiles, and the bytes that stand for nothing are 0. Matrices only.

Source: cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

TILE_ROWS, TILE_BLOCKS = 128, 4
"""Rows and blocks of one tile."""


def tiled_length(rows: int, blocks: int) -> int:
    """Bytes of a tiled scale of [rows, blocks], also for symbolic numbers."""
    across = (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS
    return (rows + TILE_ROWS - 1) // TILE_ROWS * across * (TILE_ROWS * TILE_BLOCKS)


def tile_scale(scale: Tensor) -> Tensor:
    """Scale bytes [rows, blocks], any strides, as tiled ones."""
    rows, blocks = scale.shape
    padded = F.pad(scale, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.reshape(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def untile_scale(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Scale bytes [rows, blocks] from tiled ones."""
    down, across = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    tiles = scale.reshape(down, across, 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * TILE_ROWS, across * TILE_BLOCKS)[:rows, :blocks]
