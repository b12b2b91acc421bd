"""Kernels in C++ for CPUs, built by Inductor's tool chain (see docs/cpu.md)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

MOST_ROWS = 16
"""Products of so many rows decode a stored weight in registers; the vendor's GEMM takes more."""

PART_BYTES = 16 << 20
"""Of a stored weight that is dequantized at a time for the vendor's GEMM. The system clears new memory for
every call, which takes longer than to dequantize into it; the GNU C library keeps freed blocks of up to
32 MiB for the next one."""


_TILE = 64
"""Rows of a weight of which parts are multiples."""


def parts_of(shape: Sequence[Any], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Start and number of the rows of each part of a weight [N, K] in `dtype`; [] if it is small.

    So is one of symbolic sizes.
    """
    n, k = shape
    if not (isinstance(n, int) and isinstance(k, int)) or n * k * dtype.itemsize <= PART_BYTES:
        return []
    number = math.ceil(n * k * dtype.itemsize / PART_BYTES)
    rows = math.ceil(n / number / _TILE) * _TILE
    return [(start, min(rows, n - start)) for start in range(0, n, rows)]
