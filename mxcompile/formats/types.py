"""Element types, roundings and formats of MX data: the one place their constants are written.

An MX block is 32 consecutive elements sharing one E8M0 scale: byte b stands for 2^(b − 127), 255 for NaN
(OCP Microscaling Formats v1.0, §5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from mxcompile.errors import FormatError, not_allowed

BLOCK = 32
"""Elements per block."""

SCALE_NAN = 255
"""The E8M0 byte of a block that holds NaN or Inf."""


class Rounding(StrEnum):
    """How a block's scale is derived from its amax; the elements always round to nearest even."""

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"


@dataclass(frozen=True, kw_only=True, slots=True)
class ElemType:
    """An FP8 element type.

    name: policy word. dtype: torch dtype. max: largest finite value, 1.75 · 2^emax. mantissa_bits: stored
    bits. min_exponent: exponent of the smallest normal value.
    """

    name: str
    dtype: torch.dtype
    max: float
    emax: int
    mantissa_bits: int
    min_exponent: int


E4M3 = ElemType(name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, emax=8, mantissa_bits=3, min_exponent=-6)
E5M2 = ElemType(name="e5m2", dtype=torch.float8_e5m2, max=57344.0, emax=15, mantissa_bits=2, min_exponent=-14)

ELEM_TYPES = {elem.name: elem for elem in (E4M3, E5M2)}
_BY_DTYPE = {elem.dtype: elem for elem in (E4M3, E5M2)}


class Tile(StrEnum):
    """The extent of one scale: 32 elements in a row, or a square shared by both layouts."""

    ROW = "1x32"
    SQUARE = "32x32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How one operand of a GEMM is quantized."""

    elem: ElemType = E4M3
    rounding: Rounding = Rounding.RCEIL
    tile: Tile = Tile.ROW

    def __str__(self) -> str:
        return f"{self.elem.name} {self.tile} {self.rounding}"


class ScaleLayout(StrEnum):
    """How the scale bytes of a matrix lie in memory (see `scale_tiles`)."""

    ROW_MAJOR = "row-major"
    TILED_128X4 = "128x4"


def elem_type(dtype: torch.dtype) -> ElemType:
    """The element type stored as `dtype`; `FormatError` if MXFP8 has none such."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise FormatError(not_allowed("element dtype", dtype, map(str, _BY_DTYPE))) from None


def rounding(word: str) -> Rounding:
    """The rounding called `word`; `FormatError` if there is none such."""
    try:
        return Rounding(word)
    except ValueError:
        raise FormatError(not_allowed("rounding", word, list(Rounding))) from None


def scale_layout(word: str) -> ScaleLayout:
    """The scale layout called `word`; `FormatError` if there is none such."""
    try:
        return ScaleLayout(word)
    except ValueError:
        raise FormatError(not_allowed("scale layout", word, list(ScaleLayout))) from None


def num_blocks(length: int) -> int:
    """⌈length / 32⌉, also for a symbolic length."""
    return (length + BLOCK - 1) // BLOCK
