"""Which tiles the templates run with on each chip: the kernels' own tables, and what autotuning adds to them.

A chip without a row, which only gets here if a user names another chip as the target, runs a tile that fits
any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from mxcompile.lowering.kernels.configs import SCALED_MM, Absent, MatmulConfig
from mxcompile.lowering.targets import of_device

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


def products(device: torch.device, rows: int) -> Iterator[tuple[bool, MatmulConfig]]:
    """Tiles for a product with `rows` rows, and whether its operands are swapped; the default first."""
    name = of_device(device).name
    row = SCALED_MM.get(name)
    if row is None or isinstance(row, Absent):
        yield False, _ANY
    elif rows <= row.few_rows:
        yield row.swap_few, row.few
    else:
        yield False, replace(row.many, num_warps=_WARPS)
        for tile in _MORE.get(name, ()):
            yield False, tile
