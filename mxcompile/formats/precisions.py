"""The precisions of the policy language: one row of one table each.

A precision is what a GEMM's operands are cast to. Its row says which formats the choices of a rule come to;
policy, passes, lowering, estimates, reports, audits and tuning read the row and name no precision themselves.
`add` puts a row of one's own into the table (docs/formats.md shows how).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mxcompile.errors import FormatError
from mxcompile.formats.amax import MAX, Amax, AmaxKind
from mxcompile.formats.types import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    NEAREST,
    POW2,
    TWO_LEVEL,
    ElemRounding,
    ElemType,
    Format,
    Rounding,
    ScaleType,
    Tile,
    register,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The extents of scales. x: of input and output gradient. w: of the weight. delayed: by a history."""

    x: Tile
    w: Tile
    delayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The choices about formats that a rule or preset may leave open; None is the row's default.

    elem: of input and weight. grad_elem: of the output gradient. rounding: of E8M0 scales. tiles: words of
    rows' `tiles`. weight_block: extent of the weight's scales. grad_rounding: of the output gradient's
    elements. amax: the value that scales follow from. history, margin: of delayed scales. pow2: whether FP32
    scales are powers of two. hadamard: signs of the transform of wgrad's operands, `NO_HADAMARD` for none.
    """

    elem: ElemType | None = None
    grad_elem: ElemType | None = None
    rounding: Rounding | None = None
    tiles: tuple[str, ...] = ()
    weight_block: Tile | None = None
    grad_rounding: ElemRounding | None = None
    amax: Amax | None = None
    history: int | None = None
    margin: int | None = None
    pow2: bool | None = None
    hadamard: int | None = None

    def over(self, other: Choices) -> Choices:
        """These choices, and `other`'s where there are none."""
        return Choices(
            elem=self.elem or other.elem,
            grad_elem=self.grad_elem or other.grad_elem,
            rounding=self.rounding or other.rounding,
            tiles=self.tiles + other.tiles,
            weight_block=self.weight_block or other.weight_block,
            grad_rounding=self.grad_rounding or other.grad_rounding,
            amax=self.amax or other.amax,
            history=self.history or other.history,
            margin=other.margin if self.margin is None else self.margin,
            pow2=other.pow2 if self.pow2 is None else self.pow2,
            hadamard=other.hadamard if self.hadamard is None else self.hadamard,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Formats of a linear layer's input, weight and output gradient.

    hadamard: signs of the transform that x and dy have in wgrad, None without one.
    """

    x: Format
    w: Format
    dy: Format
    hadamard: int | None = None

    def of(self, operand: str, *, wgrad: bool = False) -> Format:
        """The format of "x", "w" or "dy" in a GEMM."""
        fmt = {"x": self.x, "w": self.w, "dy": self.dy}[operand]
        return replace(fmt, hadamard=self.hadamard) if wgrad else fmt


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One row: a policy word and the formats that it gives a GEMM's operands.

    name: policy word. label: in texts. elems: element types a rule may choose, the default first; none for
    the row that leaves a GEMM as the model has it. scale: type of the scales. tiles: their extents, by the
    word a rule chooses them with, the default first. tiles_key: the key of a rule that takes this word, "" if
    there is no choice. weight_blocks: other extents a rule may choose for the weight's scales.
    """

    name: str
    label: str = field(compare=False)
    elems: tuple[ElemType, ...] = field(default=(), compare=False)
    scale: ScaleType = field(default=ScaleType.E8M0, compare=False)
    tiles: Mapping[str, Tiles] = field(default_factory=dict, compare=False)
    tiles_key: str = field(default="", compare=False)
    weight_blocks: tuple[Tile, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def quantizes(self) -> bool:
        """Whether operands are cast at all."""
        return bool(self.elems)

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a rule that mean something to this precision, beside those that every one has."""
        has = {
            "elem_dtype": len(self.elems) > 1,
            "grad_dtype": len(self.elems) > 1,
            "rounding": self.quantizes and self.scale is ScaleType.E8M0,
            "weight_block": bool(self.weight_blocks),
            "grad_rounding": self.quantizes,
            "amax": self.quantizes,
            "history": any(tiles.delayed for tiles in self.tiles.values()),
            "margin": any(tiles.delayed for tiles in self.tiles.values()),
            "scale": self.quantizes and self.scale is ScaleType.FP32,
            "hadamard": self.quantizes and self.scale is ScaleType.E4M3,
            self.tiles_key: len(self.tiles) > 1,
        }
        return frozenset(key for key, means in has.items() if means)

    def formats(self, choices: Choices) -> Operands:
        """The formats of a layer's operands. Choices that mean nothing to this row are passed over."""
        default, *_ = self.elems
        elem = choices.elem if choices.elem in self.elems else None
        grad_elem = choices.grad_elem if choices.grad_elem in self.elems else None
        tiles = self.tiles[next(word for word in (*choices.tiles, *self.tiles) if word in self.tiles)]
        block = choices.weight_block if choices.weight_block in self.weight_blocks else None
        if tiles is not next(iter(self.tiles.values())):
            block = None
        fp32, two_level = self.scale is ScaleType.FP32, self.scale is ScaleType.E4M3
        rounding = (choices.rounding or Rounding.RCEIL) if self.scale is ScaleType.E8M0 else None
        amax = choices.amax or MAX
        if tiles.delayed:
            amax = Amax(kind=AmaxKind.DELAYED, value=choices.history or HISTORY, margin=choices.margin or 0)
        elif amax.stateful and not (fp32 and tiles.x == tiles.w == Tile.TENSOR):
            amax = MAX

        def operand_format(
            elem: ElemType, tile: Tile, elements: ElemRounding = ElemRounding.NEAREST
        ) -> Format:
            return Format(
                elem=elem,
                rounding=rounding,
                tile=tile,
                scale=self.scale,
                elements=elements,
                amax=amax,
                pow2=fp32 and bool(choices.pow2),
            )

        return Operands(
            x=operand_format(elem or default, tiles.x),
            w=operand_format(elem or default, block or tiles.w),
            dy=operand_format(grad_elem or default, tiles.x, choices.grad_rounding or ElemRounding.NEAREST),
            hadamard=None if choices.hadamard == NO_HADAMARD or not two_level else choices.hadamard,
        )


def _along(*lengths: int) -> dict[str, Tiles]:
    return {str(length): Tiles(x=Tile(1, length), w=Tile(1, length)) for length in lengths}


NO_HADAMARD = -1
"""In the place of signs: no transform, whatever the preset has."""

HISTORY = 1024
"""Calls that a delayed scale looks back, where a rule does not say."""

KEPT = Precision(name="bf16", label="BF16")
"""The row of GEMMs that are left in the model's own dtype."""

PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        Precision(
            name="mxfp8",
            label="MXFP8",
            elems=(E4M3, E5M2),
            tiles=_along(32, 16, 64, 128),
            tiles_key="block",
            weight_blocks=(Tile.ROW, Tile.SQUARE),
        ),
        Precision(
            name="fp8",
            label="FP8",
            elems=(E4M3, E5M2),
            scale=ScaleType.FP32,
            tiles={
                "tensor": Tiles(x=Tile.TENSOR, w=Tile.TENSOR),
                "channel": Tiles(x=Tile.CHANNEL, w=Tile.CHANNEL),
                "block": Tiles(x=Tile(1, 128), w=Tile(128, 128)),
                "delayed": Tiles(x=Tile.TENSOR, w=Tile.TENSOR, delayed=True),
            },
            tiles_key="scaling",
        ),
        Precision(name="mxfp6_e3m2", label="MXFP6 E3M2", elems=(E3M2,), tiles=_along(32)),
        Precision(name="mxfp6_e2m3", label="MXFP6 E2M3", elems=(E2M3,), tiles=_along(32)),
        Precision(name="mxfp4", label="MXFP4", elems=(E2M1,), tiles=_along(32)),
        Precision(
            name="nvfp4",
            label="NVFP4",
            elems=(E2M1,),
            scale=ScaleType.E4M3,
            tiles=_along(16),
            weight_blocks=(Tile(1, 16), Tile(16, 16)),
        ),
        KEPT,
    )
}
"""By policy word."""


def add(row: Precision) -> None:
    """Put `row` into the table, for this process. `FormatError` if its word is taken or it has no formats."""
    if row.name in PRECISIONS:
        raise FormatError(f"there is a precision {row.name!r} already")
    if not row.elems or not row.tiles:
        raise FormatError(f"precision {row.name!r} needs at least one element type and one extent of scales")
    for elem in row.elems:
        register(elem)
    PRECISIONS[row.name] = row


def is_quantized(word: str) -> bool:
    """Whether a record of precision `word` is of a GEMM whose operands are cast."""
    return word != KEPT.name


def label(word: str) -> str:
    """The precision `word` in texts; words of no row, in reports of other versions, as they are."""
    return PRECISIONS[word].label if word in PRECISIONS else word


def labels(words: Iterable[str]) -> str:
    """The quantized precisions among `words` in texts, in the order of the table."""
    precisions = set(words)
    rows = [row for row in PRECISIONS.values() if row.quantizes]
    return " and ".join(row.label for row in rows if row.name in precisions) or rows[0].label


def stored_precision(form: Format) -> Precision:
    """The row that weights stored in `form` are of."""
    rows = (row for row in PRECISIONS.values() if row.scale is form.scale and form.elem in row.elems)
    return next(row for row in rows if any(tiles.w == form.tile for tiles in row.tiles.values()))


def elem_words() -> tuple[str, ...]:
    """Every element type of the table."""
    return tuple(dict.fromkeys(elem.name for row in PRECISIONS.values() for elem in row.elems))


def tile_words() -> tuple[str, ...]:
    """Every extent of a scale of the table."""
    all_tiles: list[Tile] = []
    for row in PRECISIONS.values():
        all_tiles += [tile for tiles in row.tiles.values() for tile in (tiles.x, tiles.w)]
        all_tiles += row.weight_blocks
    return tuple(dict.fromkeys(map(str, all_tiles)))


def derivation_words() -> tuple[str, ...]:
    """Every way a scale is derived in the table."""
    scales = {row.scale for row in PRECISIONS.values()}
    words = {ScaleType.FP32: (NEAREST, POW2), ScaleType.E4M3: (TWO_LEVEL,)}
    return (*map(str, Rounding), *(word for scale in words if scale in scales for word in words[scale]))
