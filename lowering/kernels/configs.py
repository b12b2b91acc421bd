"""Which tile sizes each kernel family runs with on each target, and which families a target does without.

One table a family, one row a target. A row is a config or the reason why the family is not for that chip. How
to add a row, and what the tests then check, is in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mxcompile.errors import TargetError
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
    found = table.get(target.name, Absent(reason="the table has no row for this chip"))
    if isinstance(found, Absent):
        raise TargetError(f"{family} does not run on {target.name}: {found.reason}")
    return found


_WIDE = TileConfig(block_m=32, block_n=512, num_warps=4)
_NARROW = TileConfig(block_m=32, block_n=256, num_warps=2)
_LIGHT = TileConfig(block_m=32, block_n=256, num_warps=4)

QUANTIZE: dict[str, dict[str, TileConfig] | Absent] = {
    name: {"rowwise": _WIDE, "columnwise": _NARROW, "both": both}
    for name, both in {
        "sm_80": _LIGHT,  # 128 elements a thread spill where integers do the conversion
        "sm_89": _LIGHT,
        "sm_90": _NARROW,
        "sm_100": _NARROW,
        "sm_103": _NARROW,
        "sm_120": _NARROW,
        "gfx942": _NARROW,
        "gfx950": _NARROW,
    }.items()
}
"""Target → layout → tile. 128 elements a thread where registers allow: each thread then holds whole blocks of
the columnwise copy, and fewer instructions are spent on reductions between threads."""
