"""Kernels in C++ for CPUs, built by Inductor's tool chain (see docs/cpu.md)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

MOST_ROWS = 16
"""Most rows for which a kernel decodes the stored weight in registers; above, the vendor's GEMM runs."""

LONG = 512
"""Least K for which a kernel rounds BF16 activations to 2^-15 of the largest in their block of 32, as in
``fp32_dot.h``: sums of so many numbers in FP32 may lose as much."""

INT16, AMX = "C++ (int16)", "C++ (AMX)"
"""Names in records of the kernels that multiply many BF16 rows by a stored weight: in MXINT8, on AVX2; in all
formats, with AMX."""

LEAST_ROWS = {INT16: MOST_ROWS + 1, AMX: 7}
"""Least rows for which these kernels are faster than the kernel for few rows."""

COMPILED_FOR = {INT16: "avx2", AMX: "amx_tile"}
"""The vector ISA of Inductor that these kernels need, as `kernel.instructions` names it."""

PART_BYTES = 16 << 20
"""Bytes of a weight that are dequantized at a time for the vendor's GEMM. The system clears new memory for
every call, which takes longer than dequantizing; the GNU C library reuses freed blocks of up to 32 MiB."""

_TILE = 64
"""Parts of a weight start at multiples of this number of rows."""


def parts_of(shape: Sequence[Any], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of each part of a weight [N, K] in `dtype`.

    Returns [] if the weight is small or a size is symbolic.
    """
    n, k = shape
    if not (isinstance(n, int) and isinstance(k, int)) or n * k * dtype.itemsize <= PART_BYTES:
        return []
    number = math.ceil(n * k * dtype.itemsize / PART_BYTES)
    rows = math.ceil(n / number / _TILE) * _TILE
    return [(start, min(rows, n - start)) for start in range(0, n, rows)]
