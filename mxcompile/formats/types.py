"""The formats of GEMM operands, and the constants of their parts.

    element   an FP8, FP6 or FP4 number
    tile      the elements that share a scale: a number across and along the contraction dimension
    scale     E8M0 (byte b means 2^(b − 127), 255 means NaN), FP32, or two levels: E4M3 for each tile, times
              one FP32 scale for the whole tensor, or for each row along the contraction
    rounding  the rule that derives an E8M0 scale from the amax of its tile. An FP32 scale is amax ÷ largest
              element, or the next power of two above that quotient
    elements  the rounding of elements: to nearest even, or stochastic

`precisions` combines formats into the precisions of policies. `encoding` defines the casts.
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
from mxcompile.formats.elements import E2M1, E4M3, ElemRounding, ElemType, elem_named, stored_elem
from mxcompile.formats.four_over_six import WORD as FOUR_OVER_SIX
from mxcompile.formats.four_over_six import FourOverSix

BLOCK = 32
"""Elements per block of OCP MX data."""

SCALE_NAN = 255
"""The E8M0 byte of a block that holds NaN or Inf."""


class Rounding(StrEnum):
    """The rules that derive a block's E8M0 scale from its amax (see `numerics.added_to_amax`)."""

    RCEIL = "rceil"
    FLOOR = "floor"
    CEIL = "ceil"
    EVEN = "even"


class ScaleType(StrEnum):
    """The number type of a scale."""

    E8M0 = "e8m0"
    FP32 = "fp32"
    E4M3 = "e4m3"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scales in graphs: ``torch.uint8`` for E8M0."""
        return _SCALE_DTYPES[self]

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the scales of stored weights: ``torch.float8_e8m0fnu`` for E8M0."""
        return torch.float8_e8m0fnu if self is ScaleType.E8M0 else self.dtype


_SCALE_DTYPES = {
    ScaleType.E8M0: torch.uint8,
    ScaleType.FP32: torch.float32,
    ScaleType.E4M3: torch.float8_e4m3fn,
}


class Scales(StrEnum):
    """The values that FP32 scales may have: all numbers, or powers of two."""

    FP32 = "fp32"
    POW2 = "pow2"


WHOLE = 0
"""Size of a tile that spans the whole dimension of the tensor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile that shares a scale: its size across and along the contraction dimension, or `WHOLE`."""

    across: int
    along: int

    ROW: ClassVar[Tile]
    TWO_LEVEL_ROW: ClassVar[Tile]
    SQUARE: ClassVar[Tile]
    CHANNEL: ClassVar[Tile]
    TENSOR: ClassVar[Tile]

    def __str__(self) -> str:
        words = (word for word, tile in _NAMED_TILES.items() if tile == self)
        return next(words, f"{self.across}x{self.along}")

    @property
    def is_square(self) -> bool:
        """Whether both sizes are equal, so that one copy serves rowwise and columnwise reads."""
        return self.across == self.along

    @classmethod
    def parse(cls, word: str) -> Tile:
        """Parses "tensor", "channel", or two sizes such as "1x32". Raises `FormatError` for other words."""
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
"""The derivation of an FP32 scale as amax ÷ largest element, rounded to the nearest FP32 number."""

POW2 = str(Scales.POW2)
"""The derivation of an FP32 scale as the least E8M0 power of two ≥ amax ÷ largest element."""

HADAMARD = "hadamard"
"""The word for a random Hadamard transform; a colon and the signs follow."""

PACKED = "packed"
"""The word for elements that share bytes."""

TWO_LEVEL = "two-level"
"""The derivation of E4M3 scales as amax ÷ largest element ÷ one FP32 scale for the whole tensor."""

ROW_SCALED = "row-scaled"
"""The word for two levels with an FP32 scale for each row along the contraction."""

_DERIVED = {NEAREST: ScaleType.FP32, POW2: ScaleType.FP32, TWO_LEVEL: ScaleType.E4M3}
"""Scale type of each derivation; the words of `Rounding` derive E8M0 scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """The format of a GEMM operand. Operators take it as its word, ``str(format)``.

    elem: element type. rounding: rounding of E8M0 scales, else None. tile: elements that share a scale.
    scale: type of scales. elements: rounding of elements. amax: value from which scales are derived. pow2:
    whether FP32 scales are powers of two. hadamard: signs of the random Hadamard transform that precedes the
    cast, or None (see `hadamard`). packed: whether a byte holds several elements along the contraction.
    four_over_six: choice between two scales of a block in two levels, or None. row_scaled: whether each row
    along the contraction has its own FP32 scale in two levels, instead of the tensor.
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
    four_over_six: FourOverSix | None = None
    row_scaled: bool = False

    def __post_init__(self) -> None:
        if self.four_over_six is not None and not (self.two_level and self.elem is E2M1):
            raise FormatError(f"{self}: {FOUR_OVER_SIX} goes with {E2M1} and {TWO_LEVEL} alone")
        if self.row_scaled and not (self.two_level and self.tile.across == 1):
            raise FormatError(f"{self}: {ROW_SCALED} goes with {TWO_LEVEL} alone, in tiles of one row")
        if self.amax.stateful and self.elem.is_coded:
            raise FormatError(
                f"{self} would turn NaN into 0: a scale of earlier calls has no NaN, and neither has"
                f" {self.elem.name}; use e4m3 or e5m2, or an amax of the tensor itself"
            )

    def __str__(self) -> str:
        words = (
            *(self.elem.name, self.tile, self.derivation, self.elements if self.stochastic else ""),
            *(self.amax if self.amax != MAX else "", self.transform, self.scales),
            PACKED if self.packed else "",
        )
        return " ".join(filter(None, map(str, words)))

    @classmethod
    def parse(cls, word: str) -> Format:
        """Parses element type, tile and derivation of the scale, such as "e4m3 1x32 rceil".

        Optional words follow: "stochastic", an `Amax`, "hadamard:" and the signs, a `FourOverSix`,
        "row-scaled", "packed". Raises `FormatError` for other words.
        """
        return _format_of(word)

    @classmethod
    def mx(cls, elem: ElemType) -> Format:
        """Returns OCP MXFP8 as products read it: with default roundings, which decoding ignores."""
        return cls(elem=elem)

    @property
    def stochastic(self) -> bool:
        """Whether elements are rounded stochastically, so that casts need a seed."""
        return self.elements is ElemRounding.STOCHASTIC

    @property
    def derivation(self) -> str:
        """The word for the derivation of scales: a `Rounding`, `TWO_LEVEL`, `POW2` or `NEAREST`."""
        if self.rounding is not None:
            return str(self.rounding)
        return TWO_LEVEL if self.two_level else POW2 if self.pow2 else NEAREST

    @property
    def transform(self) -> str:
        """The word for the transform that precedes the cast, or ""."""
        return "" if self.hadamard is None else f"{HADAMARD}:{self.hadamard}"

    @property
    def scales(self) -> str:
        """The words for the choice of scales and for the scale of each row, or ""."""
        choice = "" if self.four_over_six is None else str(self.four_over_six)
        return " ".join(filter(None, (choice, ROW_SCALED if self.row_scaled else "")))

    @property
    def unchosen(self) -> Format:
        """This format without a choice of scales. Decoding gives the same values with and without it."""
        return self if self.four_over_six is None else replace(self, four_over_six=None)

    @property
    def untransformed(self) -> Format:
        """This format without a transform."""
        return self if self.hadamard is None else replace(self, hadamard=None)

    @property
    def unpacked(self) -> Format:
        """This format with one element per byte."""
        return replace(self, packed=False)

    @property
    def per_byte(self) -> int:
        """Elements per byte."""
        return self.elem.per_byte if self.packed else 1

    @property
    def two_level(self) -> bool:
        """Whether scales have two levels, so that casts need the amax of the tensor."""
        return self.scale is ScaleType.E4M3

    @property
    def of_tensor(self) -> bool:
        """Whether a scale covers the whole tensor, so that it depends on every element."""
        return (self.two_level and not self.row_scaled) or self.tile == Tile.TENSOR

    @property
    def is_plain(self) -> bool:
        """Whether it has no choice of scales and no scales per row: packed FP4 kernels have neither."""
        return self.four_over_six is None and not self.row_scaled

    @property
    def largest(self) -> float:
        """Largest value at an FP32 scale of 1: max element; in two levels, max element · max E4M3 scale."""
        if self.four_over_six is not None:
            return self.elem.max * self.four_over_six.bound
        return self.elem.max * (E4M3.max if self.two_level else 1.0)

    @property
    def is_mx(self) -> bool:
        """Whether it is OCP MXFP8: FP8 elements under E8M0 scales, in tiles of 1×32 or 32×32."""
        return (
            self.scale is ScaleType.E8M0
            and self.tile in (Tile.ROW, Tile.SQUARE)
            and not self.elem.is_coded
            and self.amax == MAX
        )

    @property
    def is_mx_operand(self) -> bool:
        """Whether it is MXFP8 as products read it (see `mx`): 1×32 tiles, either FP8 type."""
        return self.is_mx and self == Format.mx(self.elem)

    @property
    def as_read(self) -> Format:
        """The format by which products read a copy: `mx` for MXFP8, else this format."""
        return Format.mx(self.elem) if self.is_mx else self

    @property
    def storable(self) -> bool:
        """Whether weights can be stored in it, with any rounding of scales (see `stored_form`)."""
        if self.elem.stored_dtype is None or self.amax != MAX or self.hadamard is not None or self.row_scaled:
            return False
        if self.two_level:
            return self.elem.packed is not None and self.tile == Tile.TWO_LEVEL_ROW
        return self.scale is ScaleType.E8M0 and self.tile == Tile.ROW

    @property
    def lies_stored(self) -> bool:
        """Whether elements lie in memory as in stored weights: packed, or one storable element per byte."""
        return self.packed or (self.storable and self.elem.packed is None)

    @property
    def stored(self) -> Format:
        """The format of a stored weight cast to this format: always RCEIL, as no rounding is stored."""
        return self.unchosen if self.rounding is None else replace(self, rounding=Rounding.RCEIL)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the elements of weights stored in it."""
        dtype = self.elem.stored_dtype
        assert dtype is not None, f"no weight is stored in {self}"
        return dtype

    @property
    def mx_elem(self) -> ElemType | None:
        """The FP8 type in which an MX GEMM multiplies elements of this format; None if it cannot.

        Scales must be powers of two that whole blocks of 32 share. E4M3 has all values of FP6 and FP4.
        """
        tile = self.tile
        blocks = WHOLE not in (tile.along, tile.across) and tile.along % BLOCK == 0
        if not blocks or not (self.scale is ScaleType.E8M0 or self.pow2):
            return None
        elem = E4M3 if self.elem.is_coded else self.elem
        return elem if self.elem.is_in(elem) else None

    @property
    def bytes_per_element(self) -> float:
        """Bytes of an element, packed to its bits, and its share of the scale of its tile.

        Scales per channel or tensor count as 0.
        """
        scales = 0.0 if self.tile.along == WHOLE else self.scale.dtype.itemsize / self.tile.along
        return self.elem.bits / 8 + scales / max(self.tile.across, 1)


@functools.cache
def _format_of(word: str) -> Format:
    # missing words become "", which is no element type, tile or derivation
    elem, tile, derivation, *rest = (*word.split(), "", "")[: max(3, len(word.split()))]
    roundings = [part for part in rest if part in list(ElemRounding)]
    transforms = [part for part in rest if part.startswith(f"{HADAMARD}:")]
    choices = [part for part in rest if part.startswith(f"{FOUR_OVER_SIX}:")]
    packed, row_scaled = ([part for part in rest if part == name] for name in (PACKED, ROW_SCALED))
    options = (roundings, transforms, choices, row_scaled, packed)
    amaxes = [part for part in rest if not any(part in parts for parts in options)]
    signs = [part.partition(":")[2] for part in transforms]
    if any(len(parts) > 1 for parts in (*options, amaxes)) or not all(map(str.isdecimal, signs)):
        raise FormatError(
            f"{word!r} is not a format: expected element type, tile and derivation of the scale, then at most"
            f" one of each: {' or '.join(ElemRounding)}; an amax such as percentile:99.9; {HADAMARD}: and a"
            f" whole number; {FourOverSix()}; {ROW_SCALED}; {PACKED}"
        )
    scale = _DERIVED.get(derivation, ScaleType.E8M0)
    return Format(
        elem=elem_named(elem),
        rounding=rounding(derivation) if scale is ScaleType.E8M0 else None,
        tile=Tile.parse(tile),
        scale=scale,
        elements=ElemRounding(*roundings or [ElemRounding.NEAREST]),
        amax=Amax.parse(*amaxes or [AmaxKind.MAX]),
        pow2=derivation == POW2,
        hadamard=int(signs[0]) if signs else None,
        packed=bool(packed),
        four_over_six=FourOverSix.parse(*choices) if choices else None,
        row_scaled=bool(row_scaled),
    )


class ScaleLayout(StrEnum):
    """The number and order of the scales of a copy (see `copies` and `scale_tiles`)."""

    ROW_MAJOR = "row-major"
    PER_ROW = "per-row"
    TILED_128X4 = "128x4"


def stored_form(dtype: torch.dtype, derivation: str = Rounding.RCEIL) -> Format:
    """Returns the format of weights stored as `dtype`.

    derivation: a `Rounding` for E8M0 scales, in blocks of 32; for packed elements also `TWO_LEVEL`, in blocks
    of 16. Raises `FormatError` if weights are not stored in that dtype, or not with that derivation.
    """
    elem = stored_elem(dtype)
    if derivation == TWO_LEVEL and elem.packed is not None:
        return Format(elem=elem, rounding=None, tile=Tile.TWO_LEVEL_ROW, scale=ScaleType.E4M3)
    return Format(elem=elem, rounding=rounding(derivation))


STORED_FP8_TILES = (Tile(1, 128), Tile.CHANNEL)
"""Tiles of FP8 weights in checkpoints; larger tiles in a file give each of their rows a copy of the scale."""


def fp8_form(dtype: torch.dtype, tile: Tile) -> Format:
    """Returns the format of FP8 weights of checkpoints, with FP32 scales. tile: one of `STORED_FP8_TILES`."""
    return Format(elem=stored_elem(dtype), rounding=None, tile=tile, scale=ScaleType.FP32)


def stored_forms(dtype: torch.dtype) -> tuple[Format, ...]:
    """Returns all formats that stored weights with elements of `dtype` may have."""
    form = stored_form(dtype)
    if form.elem.packed is not None:
        return form, stored_form(dtype, TWO_LEVEL)
    has_fp8 = form.elem.dtype.is_floating_point
    return form, *(fp8_form(dtype, tile) for tile in STORED_FP8_TILES if has_fp8)


def rounding(word: str) -> Rounding:
    """Returns the rounding named `word`. Raises `FormatError` for an unknown name."""
    try:
        return Rounding(word)
    except ValueError:
        raise FormatError(not_allowed("rounding", word, list(Rounding))) from None


def num_blocks(length: int, block: int = BLOCK) -> int:
    """Returns ⌈length / block⌉, also for a symbolic length."""
    return (length + block - 1) // block
