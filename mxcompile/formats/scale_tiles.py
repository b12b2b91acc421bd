"""The 128×4 tiled layout of scale bytes, which Blackwell's block-scaled MMA reads.

    tiles of 128 rows by 4 blocks, 512 bytes each, in row-major order:
    byte(r, c) of [rows, blocks] is at  (r ÷ 128 · ⌈blocks/4⌉ + c ÷ 4) · 512
                                        + r mod 32 · 16 + r mod 128 ÷ 32 · 4 + c mod 4

Rows are M of the GEMM's left operand and N of its right operand. Blocks run along K, whichever dimension of
the stored matrix that is. A tiled scale is a vector, so it cannot be transposed. Its length is a whole number
of tiles; padding bytes are 0. Only matrices have tiled scales.

Source: cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

TILE_ROWS, TILE_BLOCKS = 128, 4
"""Rows and blocks of a tile."""


def tiled_length(rows: int, blocks: int) -> int:
    """Returns the length of the tiled scale of [rows, blocks]; both may be symbolic."""
    across = (blocks + TILE_BLOCKS - 1) // TILE_BLOCKS
    return (rows + TILE_ROWS - 1) // TILE_ROWS * across * (TILE_ROWS * TILE_BLOCKS)


def tile_scale(scale: Tensor) -> Tensor:
    """Returns the tiled scale of the bytes `scale` [rows, blocks], any strides."""
    rows, blocks = scale.shape
    padded = F.pad(scale, (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.reshape(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def untile_scale(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Returns the bytes [rows, blocks] of the tiled scale `scale`."""
    down, across = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    tiles = scale.reshape(down, across, 32, 4, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * TILE_ROWS, across * TILE_BLOCKS)[:rows, :blocks]
