"""Which tiles the templates run with on each chip: the kernels' own tables, and what autotuning adds to them.

A chip without a row, which only gets here if a user names another chip as the target, runs a tile that fits
any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from torch._inductor import config

from mxcompile.lowering.kernels.configs import QUANTIZE, SCALED_MM, Absent, MatmulConfig, TileConfig, chosen
from mxcompile.lowering.targets import Target

_WARPS = 8  # an epilogue holds more than the accumulator: half of it a thread leaves room for that

_ANY = MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2)

_TCGEN05_MORE = (
    MatmulConfig(block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=3),
    MatmulConfig(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=2),
    MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=4, num_stages=4),
)

_MORE: dict[str, tuple[MatmulConfig, ...]] = {
    "sm_100": _TCGEN05_MORE,
    "sm_103": _TCGEN05_MORE,
    "sm_120": (
        MatmulConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=3),
        MatmulConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3),
    ),
    "gfx950": (
        MatmulConfig(block_m=256, block_n=128, block_k=128, num_warps=8, num_stages=2),
        MatmulConfig(block_m=128, block_n=64, block_k=256, num_warps=8, num_stages=2),
    ),
}
"""What autotuning tries beside the defaults, for many rows."""


def products(name: str, rows: int) -> list[tuple[bool, MatmulConfig]]:
    """Whether to swap the operands of a product with `rows` rows, and its tile, on the target called `name`.

    The default; where Inductor is told to autotune, others after it.
    """
    found = _products(name, rows)
    return list(found) if config.max_autotune or config.max_autotune_gemm else [next(found)]


def _products(name: str, rows: int) -> Iterator[tuple[bool, MatmulConfig]]:
    row = SCALED_MM.get(name)
    if row is None or isinstance(row, Absent):
        yield False, _ANY
    elif rows <= row.few_rows:
        yield row.swap_few, row.few
    else:
        yield False, replace(row.many, num_warps=_WARPS)
        for tile in _MORE.get(name, ()):
            yield False, tile


_PER_THREAD = 64  # elements: a producer computed in the same registers needs as many again


def cast(target: Target, layout: str) -> TileConfig:
    """The tile of a cast in `layout`, "rowwise", "columnwise" or "both", with room for its producer."""
    tile = chosen(QUANTIZE, "quantize", target).of(layout, 2)
    threads = ceil(tile.block_m * tile.block_n / _PER_THREAD)
    return replace(tile, num_warps=max(tile.num_warps, threads // target.warp_size))
