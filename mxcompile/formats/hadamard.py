"""The random Hadamard transform of 16 elements: it spreads an outlier over its block before a cast.

    y = H · D · x / 4    H[i, j] = (−1)^popcount(i & j), D a diagonal of signs

H · D / 4 is orthogonal, so the product of two operands that are both transformed along the contraction is
theirs, but for rounding. In FP32, by sums and differences of pairs whose places differ in bit 0, 1, 2 and 3,
in this order; rounded once to the dtype of the source. Missing elements of a last block are zeros, and the
result has whole blocks. The signs are a number of 16 bits; bit i is 1 where element i changes its sign.

Source: arXiv 2509.25149 §4.3; the signs of Transformer Engine are `SIGNS`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 16
"""Elements that are transformed together."""

STAGES = 4
"""Sums and differences that every element goes through: log2 of the width."""

SIGNS = 0xD7E8
"""The fixed signs of Transformer Engine's recipe."""


def num_transformed(length: int) -> int:
    """How many elements the transform of `length` has, which may be symbolic."""
    return (length + WIDTH - 1) // WIDTH * WIDTH


def transformed(x: Tensor, dim: int, signs: int) -> Tensor:
    """The transform of `x` along `dim`, in its dtype; contiguous, `num_transformed` long along `dim`."""
    at, length = dim % x.ndim, x.shape[dim]
    missing = num_transformed(length) - length
    y = F.pad(x.to(torch.float32), (0, 0) * (x.ndim - 1 - at) + (0, missing))
    y = y.movedim(at, -1).unflatten(-1, (num_transformed(length) // WIDTH, WIDTH))
    y = y * torch.tensor([-1.0 if signs >> place & 1 else 1.0 for place in range(WIDTH)], device=x.device)
    for stage in range(STAGES):
        pairs = y.unflatten(-1, (WIDTH >> (stage + 1), 2, 1 << stage))
        low, high = pairs.unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
    whole: Tensor = (y * 0.25).flatten(-2).movedim(-1, at)
    return whole.to(x.dtype).contiguous()
