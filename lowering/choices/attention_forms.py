"""The tiles of attention over a cache, and the number of parts of its keys."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.formats import num_blocks
from mxcompile.lowering.targets import Target

MOST_DIMS = 256
"""Largest head_dim for which the rows of a tile stay in registers."""

_LEAST_ROWS, _MOST_ROWS = 16, 64  # rows of a tile; tensor cores need 16
_LEAST_DIMS = 32
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """How one attention runs: rows and keys of a tile, head_dim rounded up, and the number of key parts."""

    rows: int
    keys: int
    dims: int
    parts: int

    def __str__(self) -> str:
        split = f" split {self.parts}" if self.parts > 1 else ""
        return f"{self.rows}x{self.keys}{split}"


def form(groups: int, rows: int, keys: int, dim: int, target: Target) -> AttentionForm:
    """Returns the form for `groups` key heads, each with `rows` queries and `keys` keys of `dim` elements."""
    dims = max(_LEAST_DIMS, _power_of_2(dim))
    block = min(_MOST_ROWS, max(_LEAST_ROWS, _power_of_2(rows)))
    tile = 64 if dims <= 128 and block <= 32 else 32
    wanted = num_blocks(_PROGRAMS_PER_PROCESSOR * target.processors, max(1, groups * num_blocks(rows, block)))
    parts = max(1, min(wanted, num_blocks(keys, tile)))
    return AttentionForm(rows=block, keys=tile, dims=dims, parts=parts)


def _power_of_2(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
