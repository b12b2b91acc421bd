"""The tiles of the templates on each chip: from the chip's table, and more tiles for autotuning.

A chip whose table has no tile for a product runs a tile that fits any chip. This happens only if the user
names a target that is not the machine's chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, TypeVar

import sympy
import torch
from torch._inductor import config

from mxcompile.errors import TargetError
from mxcompile.formats import BLOCK, num_blocks
from mxcompile.lowering import optional
from mxcompile.lowering.chips.tiles import MatmulConfig, ScaledChoices, TileConfig, TiledConfig, Unsupported
from mxcompile.lowering.targets import Target
from mxcompile.versions import newer

_WARPS = 8  # a thread holds half as much of the accumulator as with 4, and has registers for an epilogue

_ANY = MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2)


Tiles = list[tuple[bool, MatmulConfig]]
"""Tiles, each with whether to swap the operands."""


def products(target: Target, rows: int, *, gathered: bool = False) -> Tiles:
    """Returns tiles for a product with `rows` rows on `target`, each with whether to swap the operands.

    The first tile is the default. More follow if Inductor autotunes. gathered: whether an operand has to be
    read byte by byte.
    """
    row = target.tiles.scaled_mm
    if isinstance(row, Unsupported):
        return [(False, _ANY)]
    if rows <= row.few_rows:
        return [(row.swap_few, row.few)]
    if gathered and row.gathered is not None:
        return [(False, row.gathered)]
    more = target.tiles.more_scaled_mm if autotuning() else ()
    return [(False, tile) for tile in (replace(row.many, num_warps=_WARPS), *more)]


NARROW = 1024
"""Largest N for which autotuning fuses many rows: 8 tiles of 128 columns, or 16 of 64, quantize each row."""


def fused(target: Target, rows: int, columns: int) -> Tiles:
    """Returns the tiles of the fused product to try on `target`, each with whether to swap the operands.

    rows, columns: sizes of the product. The result has one tile without autotuning, and none if a separate
    cast is better.
    """
    row = target.tiles.fused_quantize_mm
    if isinstance(row, Unsupported):
        return []
    if rows <= row.few_rows:
        more = target.tiles.more_fused_few if autotuning() else ()
        return [(row.swap_few, tile) for tile in (row.few, *more)]
    if autotuning() and columns <= NARROW:
        return [(False, tile) for tile in (row.many, *target.tiles.more_fused_many)]
    return []


_Row = TypeVar("_Row")


def chosen(row: _Row | Unsupported, family: str, target: Target) -> _Row:
    """Returns `row`, the entry of `family` in ``target.tiles``.

    Raises:
        TargetError: The family does not run on `target`.
    """
    if isinstance(row, Unsupported):
        raise TargetError(f"{family} does not run on {target.name}: {row.reason}")
    return row


def tiled_configs(target: Target) -> tuple[TiledConfig, ...]:
    """Returns the tiles of `scaled_mm_tiled` on `target` that the installed Triton compiles."""
    release = optional.triton_release()
    rows = chosen(target.tiles.scaled_mm_tiled, "scaled_mm_tiled", target)
    return tuple(tile for tile in rows if release >= tile.since)


def tiled_default(target: Target, m: int, n: int, k: int) -> TiledConfig:
    """Returns the tile of a product [m, k] · [k, n] without warp specialization.

    That is the widest tile with which every processor has work, else the narrowest tile. If K is a single
    step, wide tiles spill with some versions of Triton, and the narrowest runs too.
    """
    plain = [tile for tile in tiled_configs(target) if not tile.warp_specialize]
    for tile in plain:
        num_tiles = num_blocks(m, tile.block_m) * num_blocks(n, tile.block_n)
        if num_tiles >= target.processors and k > tile.block_k:
            return tile
    return plain[-1]


def tiled_products(target: Target, m: int, n: int, k: int) -> list[TiledConfig]:
    """Returns the tiles of the tiled form for a product [m, k] · [k, n]; [] for few rows, which run swapped.

    The first tile is the default without warp specialization.
    """
    row = target.tiles.scaled_mm
    tensor_memory = not isinstance(target.tiles.scaled_mm_tiled, Unsupported)
    if not tensor_memory or not isinstance(row, ScaledChoices) or m <= row.few_rows:
        return []
    default = tiled_default(target, m, n, k)
    return [default, *(tile for tile in tiled_configs(target) if tile != default)]


def tiled_groups(target: Target, average: int, m: int, n: int, k: int) -> list[TiledConfig]:
    """Returns tiles without warp specialization for groups with m rows in total and `average` rows each."""
    if not tiled_products(target, average, n, k):
        return []
    return [tile for tile in tiled_products(target, m, n, k) if not tile.warp_specialize]


def tiled_groups_of_k(
    target: Target,
    sizes: tuple[int, int, int],
    groups: int,
    a_strides: Sequence[Any],
    b_strides: Sequence[Any],
) -> list[TiledConfig]:
    """Returns tiles for groups of K of a [M, K] · b [K, N]; [] unless a is M-major and b is N-major.

    sizes: M, N and K. A step covers 128 elements of K, as a tile of scales does.
    """
    m, n, k = sizes
    if contiguous(a_strides) != 0 or contiguous(b_strides) != 1:
        return []
    tiles = tiled_products(target, m, n, max(k // groups, 1)) and tiled_products(target, m * groups, n, k)
    return [tile for tile in tiles if tile.block_k == 128 and not tile.warp_specialize]


def grouped_fits(
    a_strides: Sequence[Any], b_sizes: Sequence[Any], b_strides: Sequence[Any], tile: TiledConfig
) -> bool:
    """Whether the accelerator can read a [M, K] and b [G, K, N], as one stacked matrix, by steps of `tile`.

    Sizes and strides: integers, or symbolic.
    """
    (_, k, n), (entry, *matrix) = map(_plain, (b_sizes, b_strides))
    along = contiguous(matrix)
    if contiguous(a_strides) is None or along is None:
        return False
    if along == 0:
        return bool(entry == n * matrix[1])
    return bool(entry == k * matrix[0] and k % tile.block_k == 0)


def autotuning() -> bool:
    """Whether Inductor times several kernels of a product and takes the fastest."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def contiguous(strides: Sequence[Any], itemsize: int = 1) -> int | None:
    """Returns the contiguous dimension of a matrix that the tensor memory accelerator can read, else None.

    The other stride has to be a multiple of 16 bytes. strides: integers, or symbolic.
    """
    plain = _plain(strides)
    for dim in (1, 0):
        if plain[dim] == 1 and plain[1 - dim] * itemsize % ALIGNMENT == 0:
            return dim
    return None


def single(sizes: Sequence[Any]) -> bool:
    """Whether a result has one element, which a template cannot store. sizes: integers, or symbolic.

    Inductor stores it at a constant address without a mask, where all other threads then write their zeros.
    """
    return all(size == 1 for size in _plain(sizes))


def is_one_matrix(sizes: Sequence[Any], side: int) -> bool:
    """Whether a batch of `sizes`, stacked as one matrix, has the same blocks along `side` as its matrices.

    side: −1 or −2. False for a tensor with no or one element. sizes: as in `single`.
    """
    *batch, rows, _ = plain = _plain(sizes)
    if side not in (-1, -2) or any(size == 0 for size in plain) or single(sizes):
        return False
    return not batch or side == -1 or (isinstance(rows, int | sympy.Integer) and rows % BLOCK == 0)


def _plain(sizes: Sequence[Any]) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]


ALIGNMENT = 16
"""Bytes to which the accelerator's strides and the start of a tensor are aligned."""

WORD = 4
"""Rows that do not start at a multiple of WORD elements are read and written element by element."""


_PER_THREAD = 64  # elements; a producer in the same registers needs as many again


_LIGHT = frozenset(
    {
        "load", "constant", "to_dtype", "to_dtype_bitcast", "index_expr", "add", "sub", "mul",
        "truediv", "neg", "abs", "maximum", "minimum", "where", "lt", "le", "gt", "ge",
        "eq", "ne", "relu", "exp", "sigmoid", "rsqrt", "sqrt", "square", "reciprocal",
    }
)  # fmt: skip
"""Inductor's operators that take a few instructions. A function of libdevice takes registers of its own."""


def light(used: Iterable[str]) -> bool:
    """Whether a producer that uses only these operators leaves enough registers for a packed cast."""
    return _LIGHT.issuperset(used)


def cast(
    target: Target, forms: Mapping[str, str], sources: int, *, packed: bool, scattered: bool, masked: bool
) -> TileConfig:
    """Returns the tile of a cast, small enough to leave registers for its producer.

    forms: the copies along "ROWS" and "COLUMNS", or "none". sources: number of matrices. packed: whether
    two elements share a register, and the producers are light. scattered: whether rows start anywhere, or
    are padded to blocks, so that each element needs an address in a register. masked: whether a tile of 128
    columns may extend past the matrix.
    """
    if target.emulates:  # a warp has whole blocks in both directions
        halvings = (sources > 1 and not packed and target.max_registers < 512) + scattered
        return TileConfig(block_m=32, block_n=max(32, 2 * target.warp_size >> halvings), num_warps=1)
    if sources > 1:
        # 128 columns spill registers if they are masked, and with Triton 3.9 also if they are not
        wide = packed and not masked and not newer("triton", "3.7")
        tile = TileConfig(block_m=32, block_n=128 if wide else 64, num_warps=1 if packed else 2)
    else:
        choices = chosen(target.tiles.quantize, "quantize", target)
        tile = choices.rowwise if forms["COLUMNS"] == "none" else choices.columnwise
        tile = tile if "none" in forms.values() else choices.both
        warps = ceil(tile.block_m * tile.block_n / (_PER_THREAD * (2 if packed else 1))) // target.warp_size
        tile = replace(tile, num_warps=warps if packed else max(tile.num_warps, warps))
    return replace(tile, num_warps=tile.num_warps * (2 if scattered else 1))
