"""The element types: FP8, FP6, FP4 and INT8 numbers, and how values are rounded to them.

`types` combines an element type, a tile and a scale into a format. Source: OCP Microscaling Formats v1.0, §5.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from mxcompile.errors import FormatError, not_allowed


class ElemRounding(StrEnum):
    """The rounding of elements: to nearest even, or at random with the exact value as expectation."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True, kw_only=True, slots=True)
class ElemType:
    """An element type: a sign, exponent and mantissa, with subnormals.

    An integer type, k/64, has one exponent bit: its subnormal and its normal values have the same step, so
    the bits of a magnitude are k. It has neither −0 nor the code −128.

    Attributes:
        name: Its name in policies.
        dtype: Dtype of elements. If torch has no floating-point dtype with one element per byte, a dtype of
            codes. ``torch.uint8``: codes in the low bits, made of sign, exponent field and mantissa from the
            highest bit. ``torch.int8``: k of an integer type, in two's complement.
        max: Largest finite value.
        emax: Exponent of `max`.
        mantissa_bits: Stored bits of the mantissa.
        min_exponent: Exponent of the smallest normal value.
        bits: Bits of an element.
        packed: Torch's dtype for bytes that hold several elements, the first in the lowest bits, or None.
    """

    name: str
    dtype: torch.dtype
    max: float
    emax: int
    mantissa_bits: int
    min_exponent: int
    bits: int = 8
    packed: torch.dtype | None = None

    @property
    def is_coded(self) -> bool:
        """Whether elements are codes, one per byte, because torch has no floating-point dtype for them."""
        return not self.dtype.is_floating_point

    @property
    def is_integer(self) -> bool:
        """Whether elements are integers times `step`, in two's complement."""
        return self.dtype is torch.int8

    @property
    def step(self) -> float:
        """The distance between subnormal values."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Dtype of the elements of stored weights; None if weights cannot be stored in this type."""
        return self.packed or (None if self.dtype is torch.uint8 else self.dtype)

    @property
    def per_byte(self) -> int:
        """Elements per byte of a stored weight."""
        return 8 // self.bits if self.packed else 1

    def unstorable(self, length: int) -> str:
        """Returns why a weight with `length` elements along its blocks cannot be stored, or ""."""
        shared = length % self.per_byte != 0
        return f"{self.per_byte} {self} elements share a byte, and k={length} is odd" if shared else ""

    def is_in(self, other: ElemType) -> bool:
        """Whether `other` has every value of this type."""
        return self.step >= other.step and self.mantissa_bits <= other.mantissa_bits and self.max <= other.max

    def __str__(self) -> str:
        return self.name


ELEMENTS: dict[str, ElemType] = {}


def register(elem: ElemType) -> ElemType:
    """Registers `elem`, so that formats can name it. Raises `FormatError` if another type has its name."""
    if ELEMENTS.setdefault(elem.name, elem) != elem:
        raise FormatError(f"there is another element type {elem.name!r} already: choose another name")
    return elem


E4M3 = ElemType(name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, emax=8, mantissa_bits=3, min_exponent=-6)
E5M2 = ElemType(name="e5m2", dtype=torch.float8_e5m2, max=57344.0, emax=15, mantissa_bits=2, min_exponent=-14)

E3M2 = ElemType(name="e3m2", dtype=torch.uint8, max=28.0, emax=4, mantissa_bits=2, min_exponent=-2, bits=6)
E2M3 = ElemType(name="e2m3", dtype=torch.uint8, max=7.5, emax=2, mantissa_bits=3, min_exponent=0, bits=6)
E2M1 = ElemType(
    name="e2m1", dtype=torch.uint8, max=6.0, emax=2, mantissa_bits=1, min_exponent=0, bits=4,
    packed=torch.float4_e2m1fn_x2,
)  # fmt: skip
INT8 = ElemType(name="int8", dtype=torch.int8, max=127 / 64, emax=0, mantissa_bits=6, min_exponent=0)

for _elem in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8):
    register(_elem)

FNUZ = {E4M3.dtype: torch.float8_e4m3fnuz, E5M2.dtype: torch.float8_e5m2fnuz}
"""AMD's type for each OCP dtype. Its exponent bias is larger by one, and the code of −0 is its only NaN."""

ELEM_TYPES = {elem.name: elem for elem in (E4M3, E5M2)}
"""The FP8 element types, by name."""

_BY_DTYPE = {elem.dtype: elem for elem in ELEM_TYPES.values()}


def elem_type(dtype: torch.dtype) -> ElemType:
    """Returns the FP8 element type with `dtype`. Raises `FormatError` for dtypes that MXFP8 does not have."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise FormatError(not_allowed("element dtype", dtype, map(str, _BY_DTYPE))) from None


def elem_named(word: str) -> ElemType:
    """Returns the element type named `word`. Raises `FormatError` for an unknown name."""
    if word not in ELEMENTS:
        raise FormatError(not_allowed("element type", word, ELEMENTS))
    return ELEMENTS[word]


def stored_elem(dtype: torch.dtype) -> ElemType:
    """Returns the element type of weights stored as `dtype`. Raises `FormatError` for other dtypes."""
    by_dtype = {elem.stored_dtype: elem for elem in ELEMENTS.values() if elem.stored_dtype}
    if dtype not in by_dtype:
        raise FormatError(not_allowed("element dtype", dtype, map(str, by_dtype)))
    return by_dtype[dtype]
