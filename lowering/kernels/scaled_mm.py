"""The order in which the programs of a product walk over the tiles of its result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr = 8):
    """Row and column of tile number `pid`.

    They are walked in groups of GROUP rows of tiles: neighbours then share both operands in the cache.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + pid % (GROUP * tiles_n) % rows, pid % (GROUP * tiles_n) // rows
