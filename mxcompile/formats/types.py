"""Formats as values: what one operand of a GEMM is cast to, and the constants of its parts.

    element   an FP8, FP6 or FP4 number
    tile      the extent of one scale, across and along the contraction dimension
    scale     E8M0 (byte b stands for 2^(b − 127), 255 for NaN), FP32, or two levels: E4M3 for each tile,
              times one FP32 number for the whole tensor
    rounding  how an E8M0 scale follows from the amax of its tile; an FP32 one is amax ÷ largest element, or
              the next power of two above it
    elements  how elements round: to nearest even, or stochastically

Which of these a precision of the policy puts together is in `precisions`; the cast itself is in `numerics`.
Source: OCP Microscaling Formats v1.0, §5.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

import torch

from mxcompile.errors import FormatError, not_allowed
from mxcompile.formats.amax import MAX, Amax, AmaxKind

BLOCK = 32
"""Elements per block of OCP MX data."""

SCALE_NAN = 255
"""The E8M0 byte of a block that holds NaN or Inf."""


class Rounding(StrEnum):
    """How a block's E8M0 scale is derived from its amax."""

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"


class ElemRounding(StrEnum):
    """How elements round: to nearest even, or up or down at random so that the expectation is the value."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class ScaleType(StrEnum):
    """The number type of a scale."""

    E8M0 = "e8m0"
    FP32 = "fp32"
    E4M3 = "e4m3"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds scales: E8M0 as bytes."""
        return _SCALE_DTYPES[self]

    @property
    def stored_dtype(self) -> torch.dtype:
        """Torch's own dtype for it, which the scales of stored weights have."""
        return torch.float8_e8m0fnu if self is ScaleType.E8M0 else self.dtype


_SCALE_DTYPES = {
    ScaleType.E8M0: torch.uint8,
    ScaleType.FP32: torch.float32,
    ScaleType.E4M3: torch.float8_e4m3fn,
}


class Scales(StrEnum):
    """Which numbers FP32 scales are: any, or powers of two."""

    FP32 = "fp32"
    POW2 = "pow2"


@dataclass(frozen=True, kw_only=True, slots=True)
class ElemType:
    """An element type.

    name: policy word. dtype: torch dtype of stored elements; bytes that hold one code each where torch has
    none. max: largest finite value. emax: its exponent. mantissa_bits: stored bits. min_exponent: exponent of
    the smallest normal value. bits: of an element. packed: torch's dtype of bytes that hold several elements,
    the first in the lowest bits; None where torch has none.
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
        """Whether torch has no dtype for it, so that bytes with codes stand for it."""
        return self.dtype is torch.uint8

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """Torch's dtype for stored weights of this type; None where no weight is stored in it."""
        return self.packed or (None if self.is_coded else self.dtype)

    @property
    def per_byte(self) -> int:
        """How many elements of a stored weight share a byte."""
        return 8 // self.bits if self.packed else 1

    def unstorable(self, length: int) -> str:
        """Why no weight of `length` elements along its blocks can be stored, "" if one can."""
        shared = length % self.per_byte != 0
        return f"{self.per_byte} {self} elements share a byte, and k={length} is odd" if shared else ""

    def is_in(self, other: ElemType) -> bool:
        """Whether `other` has every value that this type has."""
        steps = self.min_exponent - self.mantissa_bits >= other.min_exponent - other.mantissa_bits
        return steps and self.mantissa_bits <= other.mantissa_bits and self.max <= other.max

    def __str__(self) -> str:
        return self.name


ELEMENTS: dict[str, ElemType] = {}


def register(elem: ElemType) -> ElemType:
    """Make `elem` the element type of its name in the words of formats. `FormatError` if another has it."""
    if ELEMENTS.setdefault(elem.name, elem) != elem:
        raise FormatError(f"there is another element type {elem.name!r} already")
    return elem


E4M3 = ElemType(name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, emax=8, mantissa_bits=3, min_exponent=-6)
E5M2 = ElemType(name="e5m2", dtype=torch.float8_e5m2, max=57344.0, emax=15, mantissa_bits=2, min_exponent=-14)

E3M2 = ElemType(name="e3m2", dtype=torch.uint8, max=28.0, emax=4, mantissa_bits=2, min_exponent=-2, bits=6)
E2M3 = ElemType(name="e2m3", dtype=torch.uint8, max=7.5, emax=2, mantissa_bits=3, min_exponent=0, bits=6)
E2M1 = ElemType(
    name="e2m1", dtype=torch.uint8, max=6.0, emax=2, mantissa_bits=1, min_exponent=0, bits=4,
    packed=torch.float4_e2m1fn_x2,
)  # fmt: skip

for _elem in (E4M3, E5M2, E3M2, E2M3, E2M1):
    register(_elem)

FNUZ = {E4M3.dtype: torch.float8_e4m3fnuz, E5M2.dtype: torch.float8_e5m2fnuz}
"""The types whose exponents have a bias larger by one, without a negative 0, whose code is their only NaN."""

ELEM_TYPES = {elem.name: elem for elem in (E4M3, E5M2)}
"""The FP8 element types, by policy word."""

_BY_DTYPE = {elem.dtype: elem for elem in (E4M3, E5M2)}

WHOLE = 0
"""In a tile: as long as the tensor is in that dimension."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The extent of one scale: so many elements across and along the contraction dimension, or `WHOLE`."""

    across: int
    along: int

    ROW: ClassVar[Tile]
    TWO_LEVEL_ROW: ClassVar[Tile]
    SQUARE: ClassVar[Tile]
    CHANNEL: ClassVar[Tile]
    TENSOR: ClassVar[Tile]

    def __str__(self) -> str:
        word = next((word for word, tile in _NAMED_TILES.items() if tile == self), "")
        return word or f"{self.across}x{self.along}"

    @property
    def is_square(self) -> bool:
        """Whether it is the same across and along, so that one copy serves both layouts."""
        return self.across == self.along

    @classmethod
    def of(cls, word: str) -> Tile:
        """The tile that is written `word`; `FormatError` if none is."""
        if word in _NAMED_TILES:
            return _NAMED_TILES[word]
        across, _, along = word.partition("x")
        if across.isdecimal() and along.isdecimal() and int(across) and int(along):
            return cls(int(across), int(along))
        raise FormatError(not_allowed("tile", word, [*_NAMED_TILES, "1x32", "32x32"]))


Tile.ROW = Tile(1, BLOCK)
Tile.TWO_LEVEL_ROW = Tile(1, 16)
Tile.SQUARE = Tile(BLOCK, BLOCK)
Tile.CHANNEL = Tile(1, WHOLE)
Tile.TENSOR = Tile(WHOLE, WHOLE)
_NAMED_TILES = {"tensor": Tile.TENSOR, "channel": Tile.CHANNEL}

NEAREST = "nearest"
"""How an FP32 scale is derived: amax ÷ largest element, to the nearest FP32."""

POW2 = str(Scales.POW2)
"""The other way: the least power of two that is no less, of those that E8M0 has."""

HADAMARD = "hadamard"
"""The word for a random Hadamard transform, before a colon and its signs."""

PACKED = "packed"
"""The word for elements that share bytes."""

TWO_LEVEL = "two-level"
"""How E4M3 scales are derived: amax ÷ largest element, over one FP32 scale for the whole tensor."""

_DERIVED = {NEAREST: ScaleType.FP32, POW2: ScaleType.FP32, TWO_LEVEL: ScaleType.E4M3}
"""The scales that a word derives; E8M0 by the words of roundings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How one operand of a GEMM is quantized.

    rounding: of E8M0 scales, None for others. elements: theirs. amax: what a scale follows from. pow2:
    whether FP32 scales are powers of two. hadamard: signs of the random Hadamard transform of what is cast,
    None without one (see `hadamard`). packed: whether a byte holds several elements along the contraction.
    """

    elem: ElemType = E4M3
    rounding: Rounding | None = Rounding.RCEIL
    tile: Tile = Tile.ROW
    scale: ScaleType = ScaleType.E8M0
    elements: ElemRounding = ElemRounding.NEAREST
    amax: Amax = MAX
    pow2: bool = False
    hadamard: int | None = None
    packed: bool = False

    def __str__(self) -> str:
        words = [self.elem.name, str(self.tile), self.derivation]
        if self.stochastic:
            words.append(str(self.elements))
        if self.amax != MAX:
            words.append(str(self.amax))
        if self.transform:
            words.append(self.transform)
        if self.packed:
            words.append(PACKED)
        return " ".join(words)

    @classmethod
    def of(cls, word: str) -> Format:
        """The format written `word`: element, extent of a scale, how it is derived; `FormatError` if none.

        Further words say that elements do not round to nearest, what is not the largest magnitude, what
        transforms the tensor, and that elements are packed.
        """
        return _format_of(word)

    @classmethod
    def mx(cls, elem: ElemType) -> Format:
        """OCP MXFP8 as its products read it, which nothing tells how scales and elements were rounded."""
        return cls(elem=elem)

    @property
    def stochastic(self) -> bool:
        """Whether elements round at random, so that casts need a seed."""
        return self.elements is ElemRounding.STOCHASTIC

    @property
    def derivation(self) -> str:
        """The word for how the scale follows from amax."""
        if self.rounding is not None:
            return str(self.rounding)
        return TWO_LEVEL if self.two_level else POW2 if self.pow2 else NEAREST

    @property
    def transform(self) -> str:
        """The word for the transform of what is cast, "" without one."""
        return "" if self.hadamard is None else f"{HADAMARD}:{self.hadamard}"

    @property
    def untransformed(self) -> Format:
        """The same without a transform."""
        return self if self.hadamard is None else replace(self, hadamard=None)

    @property
    def unpacked(self) -> Format:
        """The same of elements that are numbers or codes of a byte each."""
        return replace(self, packed=False)

    @property
    def per_byte(self) -> int:
        """How many elements share a byte."""
        return self.elem.per_byte if self.packed else 1

    @property
    def two_level(self) -> bool:
        """Whether the whole tensor has a scale too, so that casts need the amax of the tensor."""
        return self.scale is ScaleType.E4M3

    @property
    def of_tensor(self) -> bool:
        """Whether some scale is of the whole tensor, so that every element counts in it."""
        return self.two_level or self.tile == Tile.TENSOR

    @property
    def largest(self) -> float:
        """The largest value over the FP32 scale: of an element, times that of an E4M3 scale."""
        return self.elem.max * (E4M3.max if self.two_level else 1.0)

    @property
    def is_mx(self) -> bool:
        """Whether it is OCP MXFP8, which has operators and kernels of its own: FP8 in E8M0 blocks of 32."""
        return (
            self.scale is ScaleType.E8M0
            and self.tile in (Tile.ROW, Tile.SQUARE)
            and not self.elem.is_coded
            and self.amax == MAX
        )

    @property
    def is_mx_operand(self) -> bool:
        """Whether it is MXFP8 as products read it (see `mx`): rows, with any FP8 elements."""
        return self.is_mx and self == Format.mx(self.elem)

    @property
    def is_mx_rows(self) -> bool:
        """Whether it is MXFP8 with a scale for every row of a block."""
        return self.is_mx and self.tile == Tile.ROW

    @property
    def as_read(self) -> Format:
        """The format of a copy as its readers know it: nothing tells how MXFP8 was rounded."""
        return Format.mx(self.elem) if self.is_mx else self

    @property
    def storable(self) -> bool:
        """Whether weights are stored in it, whatever the rounding of its scales (see `stored_form`)."""
        if self.elem.stored_dtype is None or self.amax != MAX or self.hadamard is not None:
            return False
        if self.two_level:
            return self.elem.packed is not None and self.tile == Tile.TWO_LEVEL_ROW
        return self.scale is ScaleType.E8M0 and self.tile == Tile.ROW

    @property
    def stored(self) -> Format:
        """The format of weights that a cast to it has stored: nothing tells how they were rounded."""
        return self if self.rounding is None else replace(self, rounding=Rounding.RCEIL)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Torch's dtype for the elements of weights stored in it."""
        dtype = self.elem.stored_dtype
        assert dtype is not None, f"no weight is stored in {self}"
        return dtype

    @property
    def mx_elem(self) -> ElemType | None:
        """The FP8 type in which an MX GEMM multiplies elements of this format; None if it cannot.

        It can where a scale is a power of two that whole blocks of 32 share. E4M3 has all elements of FP6
        and FP4.
        """
        tile = self.tile
        blocks = WHOLE not in (tile.along, tile.across) and tile.along % BLOCK == 0
        if not blocks or not (self.scale is ScaleType.E8M0 or self.pow2):
            return None
        elem = E4M3 if self.elem.is_coded else self.elem
        return elem if self.elem.is_in(elem) else None

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element, packed as its bits allow, with the scales of blocks along one dimension."""
        scales = 0.0 if self.tile.along == WHOLE else self.scale.dtype.itemsize / self.tile.along
        return self.elem.bits / 8 + scales / max(self.tile.across, 1)


@functools.cache
def _format_of(word: str) -> Format:
    elem, tile, derivation, *rest = (*word.split(), "", "")[: max(3, len(word.split()))]
    elements = next((one for one in rest if one in list(ElemRounding)), ElemRounding.NEAREST)
    signs = next((one.partition(":")[2] for one in rest if one.startswith(f"{HADAMARD}:")), None)
    known = (*ElemRounding, PACKED)
    others = (one for one in rest if one not in known and not one.startswith(f"{HADAMARD}:"))
    amax = next(others, AmaxKind.MAX)
    scale = _DERIVED.get(derivation, ScaleType.E8M0)
    return Format(
        elem=elem_named(elem),
        rounding=rounding(derivation) if scale is ScaleType.E8M0 else None,
        tile=Tile.of(tile),
        scale=scale,
        elements=ElemRounding(elements),
        amax=Amax.of(amax),
        pow2=derivation == POW2,
        hadamard=None if signs is None else int(signs),
        packed=PACKED in rest,
    )


class ScaleLayout(StrEnum):
    """Which scales a copy has, and how they lie in memory (see `copies` and `scale_tiles`)."""

    ROW_MAJOR = "row-major"
    PER_ROW = "per-row"
    TILED_128X4 = "128x4"


def elem_type(dtype: torch.dtype) -> ElemType:
    """The element type stored as `dtype`; `FormatError` if MXFP8 has none such."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise FormatError(not_allowed("element dtype", dtype, map(str, _BY_DTYPE))) from None


def elem_named(word: str) -> ElemType:
    """The element type called `word`; `FormatError` if there is none such."""
    if word not in ELEMENTS:
        raise FormatError(not_allowed("element type", word, ELEMENTS))
    return ELEMENTS[word]


def stored_elem(dtype: torch.dtype) -> ElemType:
    """The element type of weights stored as `dtype`; `FormatError` if no weight is stored so."""
    by_dtype = {elem.stored_dtype: elem for elem in ELEMENTS.values() if elem.stored_dtype}
    if dtype not in by_dtype:
        raise FormatError(not_allowed("element dtype", dtype, map(str, by_dtype)))
    return by_dtype[dtype]


def stored_form(dtype: torch.dtype, derivation: str = Rounding.RCEIL) -> Format:
    """The format of weights stored as `dtype`, scales derived so: by a `Rounding`, or `TWO_LEVEL`.

    E8M0 blocks of 32; or, of packed elements, E4M3 blocks of 16 under one FP32 number for the tensor.
    `FormatError` if no weight is stored so.
    """
    elem = stored_elem(dtype)
    if derivation == TWO_LEVEL and elem.packed is not None:
        return Format(elem=elem, rounding=None, tile=Tile.TWO_LEVEL_ROW, scale=ScaleType.E4M3)
    return Format(elem=elem, rounding=rounding(derivation))


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


def num_blocks(length: int, block: int = BLOCK) -> int:
    """⌈length / block⌉, also for a symbolic length."""
    return (length + block - 1) // block
