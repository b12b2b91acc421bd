"""The precisions of the policy language: one row of one table each.

A precision is what a GEMM's operands are cast to. Its row says which formats the choices of a rule come to;
policy, passes, lowering, estimates, reports, audits and tuning read the row and name no precision themselves.
`add` puts a row of one's own into the table (docs/formats.md shows how).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

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
    Scales,
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

    elem_dtype: of input and weight. grad_dtype: of the output gradient. rounding: of E8M0 scales.
    grad_rounding: of the output gradient's elements. weight_block: extent of the weight's scales. block,
    scaling: words of rows' `tiles`. scale: of FP32 scales. history, margin: of delayed scales. amax: the
    value that scales follow from. hadamard: signs of the transform of wgrad's operands; `NO_HADAMARD`: none.
    """

    elem_dtype: ElemType | None = None
    grad_dtype: ElemType | None = None
    rounding: Rounding | None = None
    grad_rounding: ElemRounding | None = None
    weight_block: Tile | None = None
    block: str | None = None
    scaling: str | None = None
    scale: Scales | None = None
    history: int | None = None
    margin: int | None = None
    amax: Amax | None = None
    hadamard: int | None = None

    def over(self, other: Choices) -> Choices:
        """These choices, and `other`'s where there are none."""
        own = {each.name: getattr(self, each.name) for each in fields(Choices)}
        return replace(other, **{key: value for key, value in own.items() if value is not None})


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
    def defaults(self) -> Choices:
        """The choices that `formats` makes where none is given, as far as a rule has words for them."""
        operands, tile = self.formats(Choices()), next(iter(self.tiles))
        return Choices(
            elem_dtype=operands.x.elem,
            grad_dtype=operands.dy.elem,
            rounding=operands.x.rounding,
            grad_rounding=operands.dy.elements,
            weight_block=operands.w.tile,
            block=tile,
            scaling=tile,
            hadamard=NO_HADAMARD,
        )

    def formats(self, choices: Choices) -> Operands:
        """The formats of a layer's operands. Choices that mean nothing to this row are passed over."""
        default, *_ = self.elems
        elem = choices.elem_dtype if choices.elem_dtype in self.elems else default
        grad_elem = choices.grad_dtype if choices.grad_dtype in self.elems else default
        usual, *_ = self.tiles.values()
        tiles = self.tiles.get(getattr(choices, self.tiles_key, ""), usual)
        has_block = tiles is usual and choices.weight_block in self.weight_blocks
        block = choices.weight_block if has_block else None
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
                pow2=fp32 and choices.scale is Scales.POW2,
            )

        return Operands(
            x=operand_format(elem, tiles.x),
            w=operand_format(elem, block or tiles.w),
            dy=operand_format(grad_elem, tiles.x, choices.grad_rounding or ElemRounding.NEAREST),
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
