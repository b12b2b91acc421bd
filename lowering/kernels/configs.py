"""The tile that a kernel family runs with on a target: that of the chip's file, or an error with the reason.

How to add a chip, and what the tests then check, is in docs/kernels.md.
"""

from __future__ import annotations

from typing import TypeVar

from mxcompile.errors import TargetError
from mxcompile.lowering import optional
from mxcompile.lowering.chips.tiles import TiledConfig, Unsupported
from mxcompile.lowering.targets import Target

_Row = TypeVar("_Row")


def chosen(row: _Row | Unsupported, family: str, target: Target) -> _Row:
    """Returns `row`, that of `family` in ``target.tiles``. Raises `TargetError` if there is none."""
    if isinstance(row, Unsupported):
        raise TargetError(f"{family} does not run on {target.name}: {row.reason}")
    return row


def tiled_configs(target: Target) -> tuple[TiledConfig, ...]:
    """The tiles of `scaled_mm_tiled` on `target` that the installed Triton compiles."""
    release = optional.triton_release()
    rows = chosen(target.tiles.scaled_mm_tiled, "scaled_mm_tiled", target)
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
