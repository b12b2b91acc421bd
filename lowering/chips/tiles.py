"""Tile configs of the kernel families on a chip, or the reason why a family is unsupported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Config of an elementwise kernel over a matrix: the largest tile of a program, and its warps."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulConfig:
    """Config of a GEMM: tile [block_m, block_n], steps of block_k along K, num_stages loads in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """The reason why a target has no kernel of a family."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeChoices:
    """Configs by the copies that a cast makes."""

    rowwise: TileConfig
    columnwise: TileConfig
    both: TileConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Choices:
    """Configs of FP8 kernels: `amax` finds an amax, `cast` casts with its scale, `blocks` with block scales.

    A tile of `blocks` is 128×128. A block of `scaling: block` is a row, a column or all of this tile.
    """

    amax: TileConfig
    cast: TileConfig
    blocks: TileConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledChoices:
    """Configs of products: `few` for up to `few_rows` rows of `a`, `many` for more rows.

    swap_few: whether `few` computes the transposed product, with swapped operands.

    gathered: replaces `many` where a kernel reads operands byte by byte, which takes registers for addresses;
    None if `many` leaves enough registers.
    """

    many: MatmulConfig
    few: MatmulConfig
    few_rows: int
    swap_few: bool
    gathered: MatmulConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledConfig(MatmulConfig):
    """A `MatmulConfig` whose tile is stored in 2^`halvings` parts, to bound the registers of the epilogue.

    warp_specialize: loads, MMA and epilogue run in separate warps. since: first Triton release that
    compiles it.
    """

    halvings: int
    warp_specialize: bool = False
    since: tuple[int, int] = (3, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnlyChoices:
    """Configs of weight-only products: a program multiplies one row (`gemv`) or block_m rows (`dot`) of x.

    packed_gemv, packed_dot: the same for weights with two codes a byte. gemv_rows, dot_rows: most rows for
    which a compiled graph prefers the kernel to the dequantized weight; `gemv` reads and decodes the weight
    again for every row.
    """

    gemv: MatmulConfig
    dot: MatmulConfig
    packed_gemv: MatmulConfig
    packed_dot: MatmulConfig
    gemv_rows: int = 4
    dot_rows: int = 32


NO_ROW = Unsupported(reason="no tile sizes are listed for the chip")
VALUES = Unsupported(reason="no MX GEMM to cast for; products read the dequantized values of templates.casts")
NO_FP4 = Unsupported(reason="no GEMM with packed FP4 operands to cast for")
EMULATED = Unsupported(reason="no block-scaled MMA; dequantized operands and the BF16 GEMM are faster")
NO_TENSOR_MEMORY = Unsupported(reason="no tensor memory; scaled_mm's pointer form is its fastest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipTiles:
    """Tile configs of a chip by kernel family.

    fp4_cast: each thread holds whole blocks along columns. scaled_mm: configs of the pointer form.
    scaled_mm_tiled: candidates, widest tiles first (see `choices.configs.tiled_default`). fused_quantize_mm:
    in a swapped config, block_m and block_n are extents of the swapped product. more_scaled_mm,
    more_fused_few, more_fused_many: further configs that autotuning tries for many rows, and for few and many
    rows of the fused product.
    """

    quantize: QuantizeChoices | Unsupported = NO_ROW
    fp8_cast: FP8Choices | Unsupported = NO_ROW
    fp4_cast: TileConfig | Unsupported = NO_ROW
    scaled_mm: ScaledChoices | Unsupported = NO_ROW
    scaled_mm_tiled: tuple[TiledConfig, ...] | Unsupported = NO_ROW
    fused_quantize_mm: ScaledChoices | Unsupported = NO_ROW
    weight_only_mm: WeightOnlyChoices | Unsupported = NO_ROW
    more_scaled_mm: tuple[MatmulConfig, ...] = ()
    more_fused_few: tuple[MatmulConfig, ...] = ()
    more_fused_many: tuple[MatmulConfig, ...] = ()


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

MX_TILES = ChipTiles(
    quantize=QUANTIZE,
    fp8_cast=FP8_CAST,
    fp4_cast=FP4_CAST,
    scaled_mm_tiled=NO_TENSOR_MEMORY,
    weight_only_mm=WEIGHT_ONLY,
)
"""Tile configs that chips share which multiply MX operands; each has its own for these products."""

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
