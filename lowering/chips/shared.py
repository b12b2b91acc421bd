"""Tiles that several chips share, and sources of their rates."""

from __future__ import annotations

from mxcompile.lowering.chips.tiles import (
    EMULATED,
    NO_FP4,
    VALUES,
    ChipTiles,
    FP4Tile,
    FP8Choices,
    MatmulConfig,
    QuantizeChoices,
    TileConfig,
    WeightOnlyChoices,
)

MAMF = "stas00/ml-engineering, accelerator benchmarks"
UNKNOWN = "assumed: no measurement of this chip"

# 128 elements a thread: it then holds whole blocks of the columnwise copy, and fewer instructions go to
# reductions between threads. Both copies need nearly every register there is for that.
WIDE = TileConfig(block_m=32, block_n=512, num_warps=4)
NARROW = TileConfig(block_m=32, block_n=256, num_warps=2)
QUANTIZE = QuantizeChoices(rowwise=WIDE, columnwise=NARROW, both=NARROW)

# 64 elements a thread; 128 spill where both copies have scales of their own
FP8_CAST = FP8Choices(
    amax=TileConfig(block_m=64, block_n=256, num_warps=4),
    cast=TileConfig(block_m=64, block_n=128, num_warps=4),
    blocks=TileConfig(block_m=128, block_n=128, num_warps=8),
)
FP4_CAST = FP4Tile(rows=64, columns=256, num_warps=4)
FUSED_FEW = MatmulConfig(block_m=32, block_n=128, block_k=128, num_warps=4, num_stages=2)


def weight_only(warps: int, gemv: int, dot: int) -> WeightOnlyChoices:
    """Returns the tiles of products with stored weights.

    warps: of a vector's product in MXFP8. gemv, dot: stages of vectors and of matrices.
    """
    return WeightOnlyChoices(
        gemv=MatmulConfig(block_m=1, block_n=8, block_k=512, num_warps=warps, num_stages=gemv),
        dot=MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=dot),
        packed_gemv=MatmulConfig(block_m=1, block_n=16, block_k=1024, num_warps=4, num_stages=gemv),
        packed_dot=MatmulConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=dot),
    )


WEIGHT_ONLY = weight_only(2, 3, 4)
WEIGHT_ONLY_AMD = weight_only(4, 2, 2)

EMULATED_TILES = ChipTiles(
    quantize=VALUES,
    fp8_cast=FP8_CAST,
    fp4_cast=NO_FP4,
    scaled_mm=EMULATED,
    scaled_mm_tiled=EMULATED,
    fused_quantize_mm=EMULATED,
    weight_only_mm=WEIGHT_ONLY,
)
"""Of a chip that multiplies FP8 and no MX operands."""
