"""Zeros in the rows of a matrix past the last group, which a grouped product leaves uninitialized.

    out[m, n] = 0 where m ≥ offs[−1]

Every program reads the end of the last group; programs without such rows store nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 32, 256


@triton.jit
def zero_rows_kernel(out_ptr, end_ptr, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeroes a tile of out [M, N], row-major. end_ptr: points to the end of the last group, int32."""
    end = tl.load(end_ptr)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    past = (row >= end) & (row < M) & (column < N)
    zero = tl.zeros((ROWS, COLUMNS), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64) * N + column, zero, mask=past)


def zero_rows(out: Tensor, offs: Tensor) -> None:
    """Zeroes rows of `out` past the last group. out: contiguous [M, N]. offs: int32 [G], ends of groups."""
    m, n = out.shape
    grid = (triton.cdiv(m, _ROWS), triton.cdiv(n, _COLUMNS))
    zero_rows_kernel[grid](out, offs[-1:], m, n, ROWS=_ROWS, COLUMNS=_COLUMNS, enable_fp_fusion=True)
