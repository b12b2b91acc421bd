"""Stochastic rounding of elements, and its random numbers.

    words     Philox2x32-7 of the counter (place, stream) under a seed: 64 random bits for four neighbours
    h         16 of these bits with the last bit set: one of 2^15 equally likely odd numbers
    z         |y|; if |y| is below the smallest normal element, their sum, rounded to FP32
    element   bits of z + h · 2^(7 − mantissa_bits), truncated after the element's last mantissa bit

|y| rounds up to the next element if the truncated part of z plus h · 2^−16 ulp reaches an ulp. The
expectation is y, to 2^−16 ulp. Neighbours are adjacent along the contraction; the last group may have fewer
than four. The place is the index of the group in the tensor, modulo 2^32, so the result does not depend on
device, order or tiling of loops. Casts with the same seed have different streams.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11), with its constants. NVIDIA's own
stochastic conversion reads 16 random bits too (PTX ISA, cvt.rs).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mxcompile.formats.elements import ElemType

ROUNDS = 7
"""Rounds of Philox; seven pass BigCrush."""

MULTIPLIER, WEYL = 0xD256D193, 0x9E3779B9
"""Factor of a round of Philox, and increment of the key after it."""

SEEDS = 1 << 32
"""Number of seeds: 0 to 2^32 − 1."""

NEIGHBOURS = 4
"""Elements per call of Philox."""

_LOW = 0xFFFFFFFF


def philox(index: Tensor, stream: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two words of Philox2x32-7, 0 to 2^32 − 1 in int64, for each counter (`index`, `stream`).

    index: int64, not negative; only its low 32 bits count. seed: int64, 0 to 2^32 − 1, broadcast.
    """
    left, right, key = index & _LOW, torch.full_like(index, stream & _LOW), seed & _LOW
    for _ in range(ROUNDS):
        part = left * (MULTIPLIER - SEEDS)  # product − left · 2^32 fits into int64
        left, right = (((part >> 32) + left) & _LOW) ^ key ^ right, part & _LOW
        key = (key + WEYL) & _LOW
    return left, right


def halves(shape: torch.Size, dim: int, stream: int, seed: Tensor) -> Tensor:
    """Returns 16 random bits for each element, int64 [shape]. dim: contraction dimension."""
    at = dim % len(shape)
    groups = [*shape[:at], -(-shape[at] // NEIGHBOURS), *shape[at + 1 :]]
    words = philox(torch.arange(prod(groups), device=seed.device).reshape(groups), stream, seed)
    parts = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return torch.stack(parts, at + 1).flatten(at, at + 1).narrow(at, 0, shape[at])


def rounded(y: Tensor, elem: ElemType, half: Tensor) -> Tensor:
    """Rounds `y` (FP32, |y| ≤ max or NaN) to values of `elem` in FP32. half: 16 random bits per element."""
    least, kept = 2.0**elem.min_exponent, 23 - elem.mantissa_bits
    magnitude = y.abs()
    small = magnitude < least
    z = torch.where(small, magnitude + least, magnitude).view(torch.int32)
    z = z + ((half.to(torch.int32) | 1) << (kept - 16))
    value = (z >> kept << kept).view(torch.float32)
    value = torch.where(small, value - least, value)
    return torch.where(y.isnan(), y, torch.copysign(value, y))
