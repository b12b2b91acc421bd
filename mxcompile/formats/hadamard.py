"""The random Hadamard transform of blocks of 16 elements, which spreads an outlier over its block.

    y = H · D · x / 4    H[i, j] = (−1)^popcount(i & j), D a diagonal of signs

H · D / 4 is orthogonal: if both operands of a product are transformed along the contraction, only rounding
changes the product. All kernels compute in FP32 and in one order, by sums and differences of pairs whose
positions differ in bit 0, then 1, 2 and 3, and round once to the dtype of x. Zeros fill the last block, so
the result has whole blocks. The signs are a 16-bit number; bit i is 1 if element i changes its sign.

Source: arXiv 2509.25149 §4.3; the signs of Transformer Engine are `SIGNS`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 16
"""Elements of a block."""

STAGES = 4
"""Number of butterfly stages, log2(`WIDTH`)."""

SIGNS = 0xD7E8
"""The fixed signs of Transformer Engine's recipe."""


def num_transformed(length: int) -> int:
    """Returns the length of the transform of `length` elements; it may be symbolic."""
    return (length + WIDTH - 1) // WIDTH * WIDTH


def transformed(x: Tensor, dim: int, signs: int) -> Tensor:
    """Returns the transform of `x` along `dim`, in its dtype, padded to `num_transformed`; contiguous."""
    at, length = dim % x.ndim, x.shape[dim]
    missing = num_transformed(length) - length
    y = F.pad(x.to(torch.float32), (0, 0) * (x.ndim - 1 - at) + (0, missing))
    y = y.movedim(at, -1).unflatten(-1, (num_transformed(length) // WIDTH, WIDTH))
    y = y * torch.tensor([-1.0 if signs >> bit & 1 else 1.0 for bit in range(WIDTH)], device=x.device)
    for stage in range(STAGES):
        pairs = y.unflatten(-1, (WIDTH >> (stage + 1), 2, 1 << stage))
        low, high = pairs.unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
    whole: Tensor = (y * 0.25).flatten(-2).movedim(-1, at)
    return whole.to(x.dtype).contiguous()
