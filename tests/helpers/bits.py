"""Comparison of tensors bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same_bits(computed: Tensor, expected: Tensor) -> bool:
    """Whether dtype, shape and, but for what a NaN carries, bits are equal, on whatever device."""
    if (computed.dtype, computed.shape) != (expected.dtype, expected.shape):
        return False
    computed, nan = computed.to(expected.device), expected.float().isnan()
    bits = _INTEGERS[expected.element_size()]
    equal = computed.contiguous().view(bits) == expected.contiguous().view(bits)
    return torch.equal(computed.float().isnan(), nan) and bool((equal | nan).all())


def assert_same_bits(computed: Iterable[Tensor], expected: Iterable[Tensor], about: object = "") -> None:
    """Asserts that tensors are equal bit for bit. A failure shows `about` and the tensor's number."""
    for number, (tensor, other) in enumerate(zip(computed, expected, strict=True)):
        assert same_bits(tensor, other), (number, about)
