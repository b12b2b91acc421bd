"""Stochastic rounding of elements, and the random numbers it takes.

    words     Philox2x32-7 of counter (place, stream) under a seed: 64 random bits for four neighbours
    half      16 of them, the last bit set: an odd number h, of which 2^15 are equally likely
    z         |y|, smaller than the smallest normal element: |y| + that, rounded to FP32
    element   the bits of z and h · 2^(7 − mantissa_bits) added, cut off at the element's last bit

So an element is one ulp above ⌊y / ulp⌋ where the rest and h · 2^−16 reach an ulp. Its expectation is y to
2^−16 ulp. Four neighbours lie along the contraction; the last group may have fewer. The place counts groups
in the order of the tensor, modulo 2^32. So every device, order and way of cutting loops gives the same.
Streams tell casts of one seed apart.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11), with its constants. NVIDIA's own
stochastic conversion reads 16 random bits too (PTX ISA, cvt.rs).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mxcompile.formats.types import ElemType

ROUNDS = 7
"""Of Philox: those that pass BigCrush."""

MULTIPLIER, WEYL = 0xD256D193, 0x9E3779B9
"""Of a round; what each adds to the key."""

SEEDS = 1 << 32
"""How many seeds there are."""

NEIGHBOURS = 4
"""Elements that share a call of Philox."""

_LOW = 0xFFFFFFFF


def philox(place: Tensor, stream: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of Philox2x32-7, 0 to 2^32 − 1 in int64, for every counter (`place`, `stream`).

    place: int64, not negative, of which the low 32 bits count. seed: int64, 0 to 2^32 − 1, broadcast.
    """
    left, right, key = place & _LOW, torch.full_like(place, stream & _LOW), seed & _LOW
    for _ in range(ROUNDS):
        part = left * (MULTIPLIER - SEEDS)  # the product less `left` · 2^32: it fits
        left, right = (((part >> 32) + left) & _LOW) ^ key ^ right, part & _LOW
        key = (key + WEYL) & _LOW
    return left, right


def halves(shape: torch.Size, dim: int, stream: int, seed: Tensor) -> Tensor:
    """The 16 random bits of elements of a tensor of `shape` contracted along `dim`, int64; not odd yet."""
    at = dim % len(shape)
    groups = [*shape[:at], -(-shape[at] // NEIGHBOURS), *shape[at + 1 :]]
    words = philox(torch.arange(prod(groups), device=seed.device).reshape(groups), stream, seed)
    parts = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    return torch.stack(parts, at + 1).flatten(at, at + 1).narrow(at, 0, shape[at])


def rounded(y: Tensor, elem: ElemType, half: Tensor) -> Tensor:
    """`y`, FP32, |y| ≤ max or NaN, rounded by `half` to a value of `elem`, in FP32; keeps the sign of 0."""
    least, kept = 2.0**elem.min_exponent, 23 - elem.mantissa_bits
    magnitude = y.abs()
    small = magnitude < least
    z = torch.where(small, magnitude + least, magnitude).view(torch.int32)
    z = z + ((half.to(torch.int32) | 1) << (kept - 16))
    value = (z >> kept << kept).view(torch.float32)
    value = torch.where(small, value - least, value)
    return torch.where(y.isnan(), y, torch.copysign(value, y))
