"""Stochastic rounding of elements, and the random numbers it takes.

    word      Philox2x32-7 of counter (index, stream) under a seed: 32 random bits for every element
    element   ⌊y / ulp⌋ · ulp, one ulp more where the rest exceeds word · 2^−32, of which 24 bits count

Expectation is y: exactly where y is a normal element's binade, to 2^−24 ulp below the smallest normal. A word
is a function of where its element lies, so that every device, order and way of cutting loops gives the same.
Streams tell casts of one seed apart; the index is the place of the element in its tensor, modulo 2^32.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11), with its constants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats.types import ElemType

ROUNDS = 7
"""Of Philox: those that pass BigCrush."""

MULTIPLIER, WEYL = 0xD256D193, 0x9E3779B9
"""Of a round; what each adds to the key."""

SEEDS = 1 << 32
"""How many seeds there are."""

_LOW = 0xFFFFFFFF


def philox(index: Tensor, stream: int, seed: Tensor) -> Tensor:
    """The first word of Philox2x32-7, 0 to 2^32 − 1 in int64, for every counter (`index`, `stream`).

    index: int64, not negative, of which the low 32 bits count. seed: int64, 0 to 2^32 − 1, broadcast.
    """
    left, right, key = index & _LOW, torch.full_like(index, stream & _LOW), seed & _LOW
    for _ in range(ROUNDS):
        high, low = multiplied(left)
        left, right = high ^ key ^ right, low
        key = (key + WEYL) & _LOW
    return left


def multiplied(x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of `x` · `MULTIPLIER`, in steps that int64 holds."""
    low = (x & 0xFFFF) * MULTIPLIER
    rest = (x >> 16) * MULTIPLIER + (low >> 16)
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def words(shape: torch.Size, stream: int, seed: Tensor) -> Tensor:
    """The random word of every element of a tensor of `shape`."""
    count = shape.numel()
    return philox(torch.arange(count, device=seed.device), stream, seed).reshape(shape)


def rounded(y: Tensor, elem: ElemType, word: Tensor) -> Tensor:
    """`y`, FP32, |y| ≤ max or NaN, rounded by `word` to a value of `elem`, in FP32; keeps the sign of 0."""
    magnitude = y.abs()
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(elem.min_exponent, elem.emax)
    shift = exponent - elem.mantissa_bits
    steps = magnitude * ((127 - shift) << 23).view(torch.float32)
    whole = steps.floor()
    up = (word >> 8).to(torch.float32) * 2.0**-24 < steps - whole
    value = (whole + up) * ((127 + shift) << 23).view(torch.float32)
    return torch.copysign(value, y)
