"""Tile configs that several chips share, and names of sources of rates."""

from __future__ import annotations

from mxcompile.lowering.chips.tiles import (
    EMULATED,
    NO_FP4,
    VALUES,
    ChipTiles,
    FP8Choices,
    MatmulConfig,
    QuantizeChoices,
    TileConfig,
    WeightOnlyChoices,
)

MAMF = "stas00/ml-engineering, accelerator benchmarks"
UNKNOWN = "assumed: no measurement of this chip"

# With 128 elements, a thread holds whole blocks of the columnwise copy, and fewer reductions cross threads.
# A cast that makes both copies then uses nearly all registers.
WIDE = TileConfig(block_m=32, block_n=512, num_warps=4)
NARROW = TileConfig(block_m=32, block_n=256, num_warps=2)
QUANTIZE = QuantizeChoices(rowwise=WIDE, columnwise=NARROW, both=NARROW)

# 64 elements a thread: 128 elements spill registers where each copy has its own scales
FP8_CAST = FP8Choices(
    amax=TileConfig(block_m=64, block_n=256, num_warps=4),
    cast=TileConfig(block_m=64, block_n=128, num_warps=4),
    blocks=TileConfig(block_m=128, block_n=128, num_warps=8),
)
FP4_CAST = TileConfig(block_m=64, block_n=256, num_warps=4)
FUSED_FEW = MatmulConfig(block_m=32, block_n=128, block_k=128, num_warps=4, num_stages=2)


def weight_only(warps: int, gemv: int, dot: int) -> WeightOnlyChoices:
    """Returns the tile configs of products with stored weights.

    warps: number of warps of the MXFP8 GEMV. gemv, dot: number of stages of the GEMV and of the matrix form.
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
"""Tile configs for chips that multiply FP8 but not MX operands."""
