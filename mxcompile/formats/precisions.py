"""The precisions of policies, as rows of one table.

The row of a precision maps the choices of a policy rule to the formats of a GEMM's operands. Policy, passes,
lowering, estimates, reports, audits and tuning read rows; their code does not name precisions. `add` adds a
row in a user's process (docs/formats.md shows how).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from mxcompile.errors import FormatError
from mxcompile.formats.amax import MAX, Amax, AmaxKind
from mxcompile.formats.elements import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, ElemRounding, ElemType, register
from mxcompile.formats.four_over_six import FourOverSix
from mxcompile.formats.types import NEAREST, POW2, TWO_LEVEL, Format, Rounding, Scales, ScaleType, Tile


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """The tiles of a layer's operands.

    Attributes:
        x: Tile of the input and of the output gradient.
        w: Tile of the weight.
        delayed: Whether scales come from an amax history.
    """

    x: Tile
    w: Tile
    delayed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The choices of a rule or preset about formats. None leaves the choice to the precision's row.

    elem_dtype: element type of input and weight. grad_dtype: element type of the output gradient. rounding:
    rounding of E8M0 scales. grad_rounding: rounding of the output gradient's elements. weight_block: tile of
    the weight. block, scaling: keys of `Precision.tiles`. scale: values of FP32 scales. history, margin:
    calls and exponent of delayed scales (see `amax`). amax: value from which scales are derived. hadamard:
    signs of the transform of wgrad's operands, or `NO_HADAMARD`. four_over_six: choice between two scales of
    a block, by operand. row_scaled: operands with an FP32 scale for each row.
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
    four_over_six: tuple[tuple[str, FourOverSix], ...] | None = None
    row_scaled: tuple[str, ...] | None = None

    def over(self, other: Choices) -> Choices:
        """Returns these choices, completed by the choices of `other`."""
        choices = {key.name: getattr(self, key.name) for key in fields(Choices)}
        return replace(other, **{key: value for key, value in choices.items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """The formats of a linear layer's input, weight and output gradient.

    hadamard: signs of the transform of x and dy in wgrad, or None.
    """

    x: Format
    w: Format
    dy: Format
    hadamard: int | None = None

    def operand_format(self, operand: str, *, wgrad: bool = False) -> Format:
        """Returns the format of `operand`: "x", "w" or "dy". wgrad: whether it is an operand of wgrad."""
        fmt = {"x": self.x, "w": self.w, "dy": self.dy}[operand]
        return replace(fmt, hadamard=self.hadamard) if wgrad else fmt


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """A row of the table: a precision and the formats of its operands.

    Attributes:
        name: Word of the precision in policies.
        label: Name in reports and other texts.
        elems: Element types that a rule may choose, the default first; empty if nothing is quantized.
        other_grad_elems: Further element types that a rule may choose for the output gradient.
        scale: Type of the scales.
        tiles: Tiles that a rule may choose, by the word in the rule, the default first.
        tiles_key: Key of the rule for that word; "" if tiles cannot be chosen.
        weight_blocks: Tiles of the weight that a rule may choose with the default `tiles`.
    """

    name: str
    label: str = field(compare=False)
    elems: tuple[ElemType, ...] = field(default=(), compare=False)
    other_grad_elems: tuple[ElemType, ...] = field(default=(), compare=False)
    scale: ScaleType = field(default=ScaleType.E8M0, compare=False)
    tiles: Mapping[str, Tiles] = field(default_factory=dict, compare=False)
    tiles_key: str = field(default="", compare=False)
    weight_blocks: tuple[Tile, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def quantizes(self) -> bool:
        """Whether operands are quantized."""
        return bool(self.elems)

    @property
    def grad_elems(self) -> tuple[ElemType, ...]:
        """Element types that a rule may choose for the output gradient, the default first."""
        return self.elems + self.other_grad_elems

    @property
    def defaults(self) -> Choices:
        """The choices that `formats` makes by default. A choice without a word for its default is None."""
        operands, tile = self.formats(Choices()), next(iter(self.tiles))
        return Choices(
            elem_dtype=operands.x.elem,
            grad_dtype=operands.dy.elem,
            rounding=operands.x.rounding,
            grad_rounding=operands.dy.elements,
            weight_block=operands.w.tile,
            block=tile,
            scaling=tile,
            scale=Scales.FP32,
            history=HISTORY,
            margin=0,
            amax=MAX,
            hadamard=NO_HADAMARD,
        )

    def formats(self, choices: Choices) -> Operands:
        """Returns the formats of a layer's operands. Ignores choices that do not apply to this row."""
        default, *_ = self.elems
        elem = choices.elem_dtype if choices.elem_dtype in self.elems else default
        grad_elem = choices.grad_dtype if choices.grad_dtype in self.grad_elems else default
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
            operand: str, elem: ElemType, tile: Tile, elements: ElemRounding = ElemRounding.NEAREST
        ) -> Format:
            return Format(
                elem=elem,
                rounding=rounding,
                tile=tile,
                scale=self.scale,
                elements=elements,
                amax=amax,
                pow2=fp32 and choices.scale is Scales.POW2,
                four_over_six=dict(choices.four_over_six or ()).get(operand) if two_level else None,
                row_scaled=two_level and operand in (choices.row_scaled or ()),
            )

        return Operands(
            x=operand_format("x", elem, tiles.x),
            w=operand_format("w", elem, block or tiles.w),
            dy=operand_format("dy", grad_elem, tiles.x, choices.grad_rounding or ElemRounding.NEAREST),
            hadamard=None if choices.hadamard == NO_HADAMARD or not two_level else choices.hadamard,
        )


def _along(*lengths: int) -> dict[str, Tiles]:
    return {str(length): Tiles(x=Tile(1, length), w=Tile(1, length)) for length in lengths}


NO_HADAMARD = -1
"""Value of `Choices.hadamard` that turns off the preset's transform."""

HISTORY = 1024
"""Default length of amax histories, in calls."""

UNQUANTIZED = Precision(name="bf16", label="BF16")
"""The row of GEMMs that stay in the model's own dtype."""

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
        Precision(
            name="mxint8",
            label="MXINT8",
            elems=(INT8,),
            other_grad_elems=(E4M3,),
            tiles=_along(32, 16, 64, 128),
            tiles_key="block",
        ),
        Precision(name="mxfp4", label="MXFP4", elems=(E2M1,), tiles=_along(32)),
        Precision(
            name="nvfp4",
            label="NVFP4",
            elems=(E2M1,),
            scale=ScaleType.E4M3,
            tiles=_along(16),
            weight_blocks=(Tile(1, 16), Tile(16, 16)),
        ),
        UNQUANTIZED,
    )
}
"""All rows, by name."""


def add(row: Precision) -> None:
    """Adds `row` to the table, for this process, and registers its element types.

    Args:
        row: A precision with at least one element type and one entry in `tiles`.

    Raises:
        FormatError: `row` lacks element types or tiles, its name is taken, or an element type's name is taken
            by another type.
    """
    if row.name in PRECISIONS:
        raise FormatError(f"a precision {row.name!r} is registered already: choose another name")
    if not row.elems or not row.tiles:
        raise FormatError(f"precision {row.name!r} needs at least one element type and one extent of scales")
    for elem in row.grad_elems:
        register(elem)
    PRECISIONS[row.name] = row


def is_quantized(word: str) -> bool:
    """Whether a GEMM with the precision named `word` in its record is quantized."""
    return word != UNQUANTIZED.name


def label(word: str) -> str:
    """Returns the label of the precision `word`, or `word` if only another version of mxcompile has it."""
    return PRECISIONS[word].label if word in PRECISIONS else word


def labels(words: Iterable[str]) -> str:
    """Returns the labels of the quantized precisions in `words`; without any, the first quantized row's."""
    precisions = set(words)
    rows = [row for row in PRECISIONS.values() if row.quantizes]
    *others, last = [row.label for row in rows if row.name in precisions] or [rows[0].label]
    return f"{', '.join(others)} and {last}" if others else last


def stored_labels() -> str:
    """Returns the labels of the rows in which weights can be stored, as a phrase."""
    rows = (row for row in PRECISIONS.values() if row.quantizes)
    *labels_, last = (row.label for row in rows if row.formats(Choices()).w.storable)
    return f"{', '.join(labels_)} or {last}"


def stored_precision(form: Format) -> Precision:
    """Returns the row of the precision that stores weights in the format `form` (see `stored_forms`)."""
    rows = (row for row in PRECISIONS.values() if row.scale is form.scale and form.elem in row.elems)
    return next(row for row in rows if any(form.tile in (tiles.x, tiles.w) for tiles in row.tiles.values()))


def elem_words() -> tuple[str, ...]:
    """Returns the names of all element types of the table."""
    return tuple(dict.fromkeys(elem.name for row in PRECISIONS.values() for elem in row.grad_elems))


def tile_words() -> tuple[str, ...]:
    """Returns the words of all tiles of the table."""
    all_tiles: list[Tile] = []
    for row in PRECISIONS.values():
        all_tiles += [tile for tiles in row.tiles.values() for tile in (tiles.x, tiles.w)]
        all_tiles += row.weight_blocks
    return tuple(dict.fromkeys(map(str, all_tiles)))


def derivation_words() -> tuple[str, ...]:
    """Returns the words of all derivations of scales in the table."""
    scales = {row.scale for row in PRECISIONS.values()}
    words = {ScaleType.FP32: (NEAREST, POW2), ScaleType.E4M3: (TWO_LEVEL,)}
    return (*map(str, Rounding), *(word for scale in words if scale in scales for word in words[scale]))
