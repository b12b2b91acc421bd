"""The tiles that the kernel families run with on a chip: a config for each family, or why it does without."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Elementwise over a matrix: the largest tile of one program, and its warps."""

    block_m: int
    block_n: int
    num_warps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulConfig:
    """A tile [block_m, block_n] of a product, block_k at a time, num_stages loads in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsupported:
    """Why a target does without a family."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeChoices:
    """By the copies that are made: "rowwise", "columnwise" or "both"."""

    rowwise: TileConfig
    columnwise: TileConfig
    both: TileConfig

    def of(self, layout: str) -> TileConfig:
        """The config for `layout`."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise, "both": self.both}[layout]


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Choices:
    """amax: of a matrix that is only read. cast: under scales that are given. blocks: with scales of its own.

    `blocks` is 128×128: the blocks of `scaling: block` are a tile's rows, columns, or all of it.
    """

    amax: TileConfig
    cast: TileConfig
    blocks: TileConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FP4Tile:
    """The tile of an FP4 cast: rows, whole blocks of them a thread's, and columns."""

    rows: int
    columns: int
    num_warps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledChoices:
    """Up to `few_rows` rows of `a` run with `few`, operands swapped if `swap_few`; more run with `many`.

    gathered: instead of `many` where operands have to be read byte by byte, which takes registers for as many
    addresses; None if `many` has them.
    """

    many: MatmulConfig
    few: MatmulConfig
    few_rows: int
    swap_few: bool
    gathered: MatmulConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledConfig:
    """A tile as in `MatmulConfig`, stored in 2^`halvings` parts, which bounds the registers of the epilogue.

    warp_specialize: loads, MMA and epilogue run in warps of their own. since: first Triton release that
    compiles it.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    halvings: int
    warp_specialize: bool = False
    since: tuple[int, int] = (3, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnlyChoices:
    """gemv: one row a program. dot: block_m rows of activations against block_n of weights.

    packed_gemv, packed_dot: the same of weights with two codes a byte. gemv_rows, dot_rows: up to so many
    rows a compiled graph prefers the form to the dequantized weight; every row of the gemv form reads and
    decodes the weight anew.
    """

    gemv: MatmulConfig
    dot: MatmulConfig
    packed_gemv: MatmulConfig
    packed_dot: MatmulConfig
    gemv_rows: int = 4
    dot_rows: int = 32


NO_ROW = Unsupported(reason="the chip has no tiles for it")
VALUES = Unsupported(
    reason="no MX GEMM to cast for; products read values, which templates.operand_casts makes"
)
NO_FP4 = Unsupported(reason="no GEMM of packed FP4 operands to cast for")
EMULATED = Unsupported(reason="no block-scaled MMA; dequantized operands and the BF16 GEMM are faster")
NO_TENSOR_MEMORY = Unsupported(reason="no tensor memory; scaled_mm's pointer form is its fastest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipTiles:
    """The tiles of a chip by kernel family.

    scaled_mm: of the pointer form. scaled_mm_tiled: to choose among, those of the widest tiles first (see
    `kernels.configs.tiled_default`). fused_quantize_mm: blocks of a swapped config are those of the swapped
    product. more_scaled_mm, more_fused_few, more_fused_many: what autotuning tries beside the defaults, for
    many rows, and for few and many rows of the fused product.
    """

    quantize: QuantizeChoices | Unsupported = NO_ROW
    fp8_cast: FP8Choices | Unsupported = NO_ROW
    fp4_cast: FP4Tile | Unsupported = NO_ROW
    scaled_mm: ScaledChoices | Unsupported = NO_ROW
    scaled_mm_tiled: tuple[TiledConfig, ...] | Unsupported = NO_ROW
    fused_quantize_mm: ScaledChoices | Unsupported = NO_ROW
    weight_only_mm: WeightOnlyChoices | Unsupported = NO_ROW
    more_scaled_mm: tuple[MatmulConfig, ...] = ()
    more_fused_few: tuple[MatmulConfig, ...] = ()
    more_fused_many: tuple[MatmulConfig, ...] = ()
