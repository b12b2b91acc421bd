"""The tile that a kernel family runs with on a target: an entry of the chip's file, or an error.

docs/kernels.md describes how to add a chip, and which tests check it.
"""

from __future__ import annotations

from typing import TypeVar

from mxcompile.errors import TargetError
from mxcompile.lowering import optional
from mxcompile.lowering.chips.tiles import TiledConfig, Unsupported
from mxcompile.lowering.targets import Target

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
    return tuple(config for config in rows if release >= config.since)


def tiled_default(target: Target, m: int, n: int, k: int) -> TiledConfig:
    """Returns the tile of a product [m, k] · [k, n] without warp specialization.

    That is the widest tile with which every processor has work, else the narrowest tile. If K is a single
    step, wide tiles spill with some versions of Triton, and the narrowest runs too.
    """
    plain = [config for config in tiled_configs(target) if not config.warp_specialize]
    for config in plain:
        if k > config.block_k and -(-m // config.block_m) * -(-n // config.block_n) >= target.processors:
            return config
    return plain[-1]
