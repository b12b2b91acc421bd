"""The form, the tile and the split of K of a weight-only product.

    gemv   one row a program, in FP32: one token, or activations that are not BF16
    dot    all rows of BF16 on the tensor cores

`kernels.weight_only_mm` computes the forms. Tiles come from the chip's table; autotuning tries more tiles.
Symbolic sizes are replaced by their hints, because a form computes products of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mxcompile.formats import num_blocks
from mxcompile.lowering.chips.tiles import MatmulConfig, Unsupported, WeightOnlyChoices
from mxcompile.lowering.choices.configs import autotuning
from mxcompile.lowering.targets import Target

_PROGRAMS_PER_PROCESSOR = 2
"""K is split until every multiprocessor has this many programs."""

_DOT_ROWS = 16  # rows of a tile; tensor cores need 16
_WIDE_ROWS = 32  # rows of a tile if x has more; each tile reads the weight once

_MORE = {
    "gemv": (
        MatmulConfig(block_m=1, block_n=4, block_k=1024, num_warps=4, num_stages=3),
        MatmulConfig(block_m=1, block_n=16, block_k=256, num_warps=4, num_stages=3),
    ),
    "dot": (
        MatmulConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=4),
        MatmulConfig(block_m=16, block_n=128, block_k=128, num_warps=8, num_stages=3),
    ),
    "packed_gemv": (
        MatmulConfig(block_m=1, block_n=8, block_k=2048, num_warps=4, num_stages=3),
        MatmulConfig(block_m=1, block_n=32, block_k=512, num_warps=4, num_stages=3),
    ),
    "packed_dot": (
        MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
        MatmulConfig(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=3),
    ),
}
"""Further tiles that autotuning tries, by the field of `WeightOnlyChoices`."""

_AMD_STAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOnlyForm:
    """How one product runs. parts: number of parts of K that a second kernel sums; 1 if K is not split."""

    on_tensor_cores: bool
    tile: MatmulConfig
    parts: int

    def __str__(self) -> str:
        tile = f"{self.tile.block_m}x{self.tile.block_n}x{self.tile.block_k}"
        return f"{self._kind} {tile}{self._split}"

    @property
    def _kind(self) -> str:
        return "dot" if self.on_tensor_cores else "gemv"

    @property
    def _split(self) -> str:
        return f" split {self.parts}" if self.parts > 1 else ""

    def one_of(self, count: int) -> str:
        """Returns the name of a choice among `count` tiles of this form."""
        return str(self) if count == 1 else f"{self._kind} autotuned of {count}{self._split}"


def row_of(target: Target) -> WeightOnlyChoices | None:
    """Returns the chip's configs of weight-only products, or None."""
    row = target.tiles.weight_only_mm
    return None if isinstance(row, Unsupported) else row


def most_rows(target: Target, dtype: torch.dtype) -> int:
    """Returns the largest number of rows of `dtype` that the kernel takes; 0 on a chip without the kernel."""
    row = row_of(target)
    if row is None:
        return 0
    return row.dot_rows if dtype is torch.bfloat16 else row.gemv_rows


def forms(
    rows: int, n: int, k: int, dtype: torch.dtype, target: Target, *, packed: bool = False
) -> list[WeightOnlyForm]:
    """Returns forms of a product of `rows` rows of `dtype` by a weight [n, k], on a chip with a row.

    The first form is the default. If Inductor autotunes, more tiles with the same split of K follow. packed:
    whether the weight has two codes a byte.
    """
    row = row_of(target)
    assert row is not None, f"{target.name} has weight-only kernels"
    on_tensor_cores = rows > 1 and dtype is torch.bfloat16
    kind = ("packed_" if packed else "") + ("dot" if on_tensor_cores else "gemv")
    tiles = [getattr(row, kind), *(_MORE[kind] if autotuning() else ())]
    if on_tensor_cores and rows > _DOT_ROWS:
        tiles = [replace(tile, block_m=_WIDE_ROWS) for tile in tiles]
    if target.warp_size > 32:
        tiles = [replace(tile, num_stages=min(tile.num_stages, _AMD_STAGES)) for tile in tiles]
    parts = _parts(rows, n, k, tiles[0], target)
    return [WeightOnlyForm(on_tensor_cores=on_tensor_cores, tile=tile, parts=parts) for tile in tiles]


def _parts(m: int, n: int, k: int, config: MatmulConfig, target: Target) -> int:
    """Returns the number of parts of K; each but the last has the same number of steps."""
    programs = num_blocks(m, config.block_m) * num_blocks(n, config.block_n)
    steps = num_blocks(k, config.block_k)
    wanted = num_blocks(_PROGRAMS_PER_PROCESSOR * target.processors, max(programs, 1))
    span = num_blocks(steps, max(1, min(wanted, steps // 2)))  # a part takes at least two steps
    return max(1, num_blocks(steps, max(span, 1)))
