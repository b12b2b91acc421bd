"""Parts that templates over tiles of a matrix share: indices, the grid and extra buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.select_algorithm import SymbolicGridFn

TILE_INDICES = r"""
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
"""
"""Source: the rows `rm` and columns `rn` of a tile of X [M, N]."""


@SymbolicGridFn
def grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    """Returns the grid: one program per tile."""
    return cdiv(m, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


def empty(x: Any, shape: Sequence[Any], dtype: torch.dtype) -> ir.TensorBox:
    """Returns an empty buffer on the device of `x`, for a kernel that writes more than its result."""
    result: ir.TensorBox = empty_strided(list(shape), None, dtype=dtype, device=x.get_device_or_error())
    result.realize()
    return result
