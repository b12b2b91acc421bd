"""Which tile sizes each kernel family runs with on each target, and which families a target does without.

One table a family, one row a target. A row is a config or the reason why the family is not for that chip. How
to add a row, and what the tests then check, is in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mxcompile.errors import TargetError
from mxcompile.lowering import optional
from mxcompile.lowering.targets import Target


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
class Absent:
    """Why a target does without a family."""

    reason: str


_Row = TypeVar("_Row")


def chosen(table: Mapping[str, _Row | Absent], family: str, target: Target) -> _Row:
    """The row of `target`. Raises `TargetError`, with the reason, where the target does without."""
    row = table.get(target.name, Absent(reason="the table has no row for this chip"))
    if isinstance(row, Absent):
        raise TargetError(f"{family} does not run on {target.name}: {row.reason}")
    return row


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeChoices:
    """By the copies that are made: "rowwise", "columnwise" or "both"."""

    rowwise: TileConfig
    columnwise: TileConfig
    both: TileConfig

    def of(self, layout: str) -> TileConfig:
        """The config for `layout`."""
        return {"rowwise": self.rowwise, "columnwise": self.columnwise, "both": self.both}[layout]


# 128 elements a thread: it then holds whole blocks of the columnwise copy, and fewer instructions go to
# reductions between threads. Both copies need nearly every register there is for that.
_WIDE = TileConfig(block_m=32, block_n=512, num_warps=4)
_NARROW = TileConfig(block_m=32, block_n=256, num_warps=2)
_LIGHT = TileConfig(block_m=32, block_n=256, num_warps=4)
_ROOMY = QuantizeChoices(rowwise=_WIDE, columnwise=_NARROW, both=_NARROW)
_TIGHT = QuantizeChoices(rowwise=_WIDE, columnwise=_NARROW, both=_LIGHT)
_VALUES = Absent(reason="no MX GEMM to cast for; products read values, which templates.operand_casts makes")

QUANTIZE: dict[str, QuantizeChoices | Absent] = {
    "sm_80": _VALUES,
    "sm_89": _VALUES,
    "sm_90": _VALUES,
    "sm_100": _ROOMY,
    "sm_103": _ROOMY,
    "sm_120": _TIGHT,
    "gfx942": _VALUES,
    "gfx950": _ROOMY,
}
"""Target → tile by layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Choices:
    """amax: of a matrix that is only read. cast: under scales that are given. blocks: with scales of its own.

    `blocks` is 128×128: the blocks of `scaling: block` are a tile's rows, columns, or all of it.
    """

    amax: TileConfig
    cast: TileConfig
    blocks: TileConfig


# 64 elements a thread; 128 spill where both copies have scales of their own
_FP8 = FP8Choices(
    amax=TileConfig(block_m=64, block_n=256, num_warps=4),
    cast=TileConfig(block_m=64, block_n=128, num_warps=4),
    blocks=TileConfig(block_m=128, block_n=128, num_warps=8),
)
_NO_FP8 = Absent(reason="no FP8 GEMM to cast for")

FP8_CAST: dict[str, FP8Choices | Absent] = {
    "sm_80": _NO_FP8,
    "sm_89": _FP8,
    "sm_90": _FP8,
    "sm_100": _FP8,
    "sm_103": _FP8,
    "sm_120": _FP8,
    "gfx942": _FP8,
    "gfx950": _FP8,
}
"""Target → tiles of casts with FP32 scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP4Tile:
    """The tile of an FP4 cast: rows, whole blocks of them a thread's, and columns."""

    rows: int
    columns: int
    num_warps: int


_FP4 = FP4Tile(rows=64, columns=256, num_warps=4)
_FP4_AMD = FP4Tile(rows=64, columns=256, num_warps=4)
_NO_FP4 = Absent(reason="no GEMM of packed FP4 operands to cast for")

FP4_CAST: dict[str, FP4Tile | Absent] = {
    "sm_80": _NO_FP4,
    "sm_89": _NO_FP4,
    "sm_90": _NO_FP4,
    "sm_100": _FP4,
    "sm_103": _FP4,
    "sm_120": _FP4,
    "gfx942": _NO_FP4,
    "gfx950": _FP4_AMD,
}
"""Target → tile of casts to packed FP4."""


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


_EMULATED = Absent(reason="no block-scaled MMA; dequantized operands and the BF16 GEMM are faster")
_TCGEN05 = ScaledChoices(
    many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=4, num_stages=4),
    few=MatmulConfig(block_m=128, block_n=32, block_k=256, num_warps=4, num_stages=3),
    few_rows=64,
    swap_few=True,  # the instruction is native from 128 rows of A, and from 16 of B
    gathered=MatmulConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3),
)

SCALED_MM: dict[str, ScaledChoices | Absent] = {
    "sm_80": _EMULATED,
    "sm_89": _EMULATED,
    "sm_90": _EMULATED,
    "sm_100": _TCGEN05,
    "sm_103": _TCGEN05,
    "sm_120": ScaledChoices(
        # MN-major operands are gathered byte by byte and need the registers that block_k=128 would take
        many=MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
        # a fourth stage spills with Triton 3.8
        few=MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
        few_rows=32,
        swap_few=False,
        gathered=MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=8, num_stages=3),
    ),
    "gfx942": _EMULATED,
    "gfx950": ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=2),
        few=MatmulConfig(block_m=16, block_n=128, block_k=256, num_warps=4, num_stages=2),
        few_rows=32,
        swap_few=False,
    ),
}
"""Target → configs of the pointer form."""


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


_NO_TENSOR_MEMORY = Absent(reason="no tensor memory; scaled_mm's pointer form is its fastest")
# Warp-specialised, 256 columns take more tensor memory than there is with Triton 3.9.
_TILED = (
    TiledConfig(block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=4, halvings=2),
    TiledConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4, halvings=2),
    TiledConfig(
        block_m=128,
        block_n=128,
        block_k=128,
        num_warps=4,
        num_stages=4,
        halvings=1,
        warp_specialize=True,
        since=(3, 7),
    ),
)

SCALED_MM_TILED: dict[str, tuple[TiledConfig, ...] | Absent] = {
    "sm_80": _EMULATED,
    "sm_89": _EMULATED,
    "sm_90": _EMULATED,
    "sm_100": _TILED,
    "sm_103": _TILED,
    "sm_120": _NO_TENSOR_MEMORY,
    "gfx942": _EMULATED,
    "gfx950": _NO_TENSOR_MEMORY,
}
"""Target → configs to choose among, those of the widest tiles first; see `tiled_default`."""


def tiled_configs(target: Target) -> tuple[TiledConfig, ...]:
    """The rows of `SCALED_MM_TILED` for `target` that the installed Triton compiles."""
    release = optional.triton_release()
    rows = chosen(SCALED_MM_TILED, "scaled_mm_tiled", target)
    return tuple(config for config in rows if release >= config.since)


def tiled_default(target: Target, m: int, n: int, k: int) -> TiledConfig:
    """The tile of a product [m, k] · [k, n] without specialised warps: the widest, if each processor has one.

    The narrowest if there is none, and where K is a single step: the widest then spills on some Tritons.
    """
    plain = [config for config in tiled_configs(target) if not config.warp_specialize]
    for config in plain:
        if k > config.block_k and -(-m // config.block_m) * -(-n // config.block_n) >= target.processors:
            return config
    return plain[-1]


_FUSED_TCGEN05 = ScaledChoices(
    many=MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
    few=MatmulConfig(block_m=128, block_n=32, block_k=128, num_warps=8, num_stages=3),
    few_rows=64,
    swap_few=True,
)

FUSED_QUANTIZE_MM: dict[str, ScaledChoices | Absent] = {
    "sm_80": _EMULATED,
    "sm_89": _EMULATED,
    "sm_90": _EMULATED,
    "sm_100": _FUSED_TCGEN05,
    "sm_103": _FUSED_TCGEN05,
    "sm_120": ScaledChoices(
        many=MatmulConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=3),
        few=MatmulConfig(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3),
        few_rows=32,
        swap_few=False,
    ),
    "gfx942": _EMULATED,
    "gfx950": ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=2),
        few=MatmulConfig(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=2),
        few_rows=32,
        swap_few=False,
    ),
}
"""Target → configs; blocks of a swapped config are those of the swapped product."""


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


_WEIGHT_ONLY = WeightOnlyChoices(
    gemv=MatmulConfig(block_m=1, block_n=8, block_k=512, num_warps=4, num_stages=3),
    dot=MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
    packed_gemv=MatmulConfig(block_m=1, block_n=16, block_k=1024, num_warps=4, num_stages=3),
    packed_dot=MatmulConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=4),
)
_WEIGHT_ONLY_AMD = WeightOnlyChoices(
    gemv=MatmulConfig(block_m=1, block_n=8, block_k=512, num_warps=4, num_stages=2),
    dot=MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=2),
    packed_gemv=MatmulConfig(block_m=1, block_n=16, block_k=1024, num_warps=4, num_stages=2),
    packed_dot=MatmulConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=2),
)

WEIGHT_ONLY_MM: dict[str, WeightOnlyChoices | Absent] = {
    "sm_80": _WEIGHT_ONLY,
    "sm_89": _WEIGHT_ONLY,
    "sm_90": _WEIGHT_ONLY,
    "sm_100": _WEIGHT_ONLY,
    "sm_103": _WEIGHT_ONLY,
    "sm_120": _WEIGHT_ONLY,
    "gfx942": _WEIGHT_ONLY_AMD,
    "gfx950": _WEIGHT_ONLY_AMD,
}
"""Target → configs."""
