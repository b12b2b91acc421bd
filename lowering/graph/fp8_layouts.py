"""fp8_layouts: FP8 casts of one matrix become one operator that reads it, whatever layouts it is read in.

    cast(x, −1), cast(x, −2), encode_transposed(x, …)
        →  scales(x), encode_layouts(x, scales)        scales of a tensor or of channels
        →  encode_layouts(x, scale)                    scales known before (see `amax`), with `largest(x)`
        →  encode_blocks(x)                            scales of blocks

For chips whose casts are templates (``templates.fp8_casts``), after `vendor_fp8` has put products on the
vendor's GEMM and made their transposed operands `encode_transposed`. A cast that anything else reads, an
emulated product say, stays as it is, and so do batches, empty matrices, stochastic elements and percentiles;
and one that is pointwise, a copy along rows under a scale known before: it fuses with its neighbours, behind
a product too.
Numerics do not change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.formats import WHOLE, AmaxKind, Copy, Format, ScaleType, Tile
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.graph.transpose import readers
from mxcompile.lowering.graph.lowering_pass import FP8_CASTS, NO_REASONS, LoweringPass, Reasons
from mxcompile.ops.view import Cast, EncodeTransposed, Product, result_of, results_of

_TILES = (Tile.TENSOR, Tile.CHANNEL, Tile(1, 128), Tile(128, 128))


@dataclass(kw_only=True, slots=True)
class _Casts:
    """The casts that a graph makes of one matrix in one format.

    first: of these nodes. row, column: casts along rows or both ways, and along columns. down:
    `encode_transposed`. largest: the node that asks for the largest magnitude.
    """

    first: fx.Node
    row: fx.Node | None = None
    column: fx.Node | None = None
    down: list[fx.Node] = field(default_factory=list)
    largest: fx.Node | None = None


_Key = tuple[fx.Node, str, fx.Node | None]
"""Matrix, format, and scale if that is known before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Layouts(LoweringPass):
    """For chips with an FP8 GEMM."""

    name: ClassVar[str] = "fp8_layouts"
    templates: ClassVar[tuple[str, ...]] = FP8_CASTS

    @property
    def applies(self) -> bool:
        """Where the vendor's GEMM takes FP8 operands."""
        return bool(self.target.fp8_tiles)

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the casts of `graph`, each where its first one was."""
        dead.eliminate(graph)  # views of elements that are read transposed instead
        build = Builder(graph, self.name)
        for key, casts in _found(graph).items():
            with graph.inserting_before(casts.first):
                _write(build, key, casts)
        dead.eliminate(graph)
        return NO_REASONS


def fits(cast: Cast) -> bool:
    """Whether `cast` is one that the templates make."""
    form, value = cast.form, tensor(cast.x)
    if cast.copy != Copy(format=form, dim=cast.side):  # a part of it, or values
        return False
    if value is None or value.ndim != 2 or form.scale is not ScaleType.FP32 or form.elem.is_coded:
        return False
    if form.stochastic or form.amax.kind is AmaxKind.PERCENTILE or form.tile not in _TILES:
        return False
    return all(not isinstance(size, int) or size > 0 for size in value.shape)


def _found(graph: fx.Graph) -> dict[_Key, _Casts]:
    by_matrix: dict[_Key, _Casts] = {}
    for node in graph.nodes:
        cast, transposed = Cast.of(node), EncodeTransposed.of(node)
        if cast is not None and fits(cast) and not _read_otherwise(cast):
            casts = by_matrix.setdefault((cast.x, cast.fmt, cast.scale), _Casts(first=node))
            if _along_rows(cast):
                casts.row = node
            else:
                casts.column = node
        elif transposed is not None:
            cast = Cast.of(result_of(transposed.scale)[0])
            own = cast is not None and cast.scale is None
            key = transposed.x, transposed.fmt, None if own else transposed.scale
            by_matrix.setdefault(key, _Casts(first=node)).down.append(node)
    for (source, word, given), casts in by_matrix.items():
        if given is not None and Format.of(word).amax.stateful:
            casts.largest = next((user for user in source.users if _waits_for(user, casts.first)), None)
    return {key: casts for key, casts in by_matrix.items() if not _is_pointwise(key, casts)}


def _is_pointwise(key: _Key, casts: _Casts) -> bool:
    """Whether each element follows from one of the matrix, and lies where that lies."""
    alone = casts.column is None and not casts.down and casts.largest is None
    return (
        alone and key[2] is not None and not any(node.target is ops.as_fnuz for node in _reading(casts.row))
    )


def _reading(cast: fx.Node | None) -> list[fx.Node]:
    """Returns the nodes that read the elements of `cast`."""
    return [user for node in _results(cast, 0) for user in node.users]


def _waits_for(node: fx.Node, first: fx.Node) -> bool:
    """Whether `node` asks for the largest magnitude, and what reads it comes after `first`."""
    return node.target is ops.largest and all(user > first for user in node.users)


def _along_rows(cast: Cast) -> bool:
    """Whether `cast` contracts the last dimension of a matrix, or its scales serve both."""
    return cast.side == -1 or cast.form.tile.is_square


def _read_otherwise(cast: Cast) -> bool:
    """Whether elements along columns are read as they lie, or a product that is emulated reads them."""
    for place, result in results_of(cast.node):
        if place == 0 and result.users and not _along_rows(cast):
            return True
        if any(map(_is_emulated, (reader for reader, _ in readers(result)))):
            return True
    return False


def _is_emulated(reader: fx.Node) -> bool:
    """Whether `reader` is a product that neither the vendor nor an MX GEMM runs."""
    product = Product.of(reader)
    return product is not None and not product.is_packed and not product.is_mx


def _results(cast: fx.Node | None, index: int) -> list[fx.Node]:
    """The nodes that pick result `index` of `cast` and are read."""
    if cast is None:
        return []
    return [result for place, result in results_of(cast) if place == index and result.users]


def _write(build: Builder, key: _Key, casts: _Casts) -> None:
    """Writes the operators that replace `casts`, at the current place."""
    _, word, _ = key
    elements = _results(casts.row, 0)
    readers = _reading(casts.row)
    halved = bool(readers) and all(user.target is ops.as_fnuz for user in readers)
    if halved:
        elements = readers
    halves = {EncodeTransposed.read(node).fnuz for node in casts.down}
    if elements and casts.down and halves != {halved}:  # elements of two types take two kernels
        parts = [(elements, [], halved), ([], casts.down, halves.pop())]
    else:
        parts = [(elements, casts.down, halved or True in halves)]
    write = _layouts if Format.of(word).tile.along == WHOLE else _blocks
    for part in parts:
        write(build, key, casts, *part)


def _call(build: Builder, casts: _Casts, target: Any, *args: Any) -> Callable[[int, list[fx.Node]], None]:
    """A call of `target`; what is returned puts its results in the place of nodes."""
    new_node = build.call(target, *args, like=casts.first)

    def put(index: int, nodes: list[fx.Node]) -> None:
        if nodes:
            result = build.call(operator.getitem, new_node, index, like=casts.first)
            for node in nodes:
                node.replace_all_uses_with(result)

    return put


def _layouts(
    build: Builder, key: _Key, casts: _Casts, elements: list[fx.Node], down: list[fx.Node], fnuz: bool
) -> None:
    """Casts with scales of a tensor or of channels."""
    source, word, given = key
    row = column = given
    if given is None:
        both = Format.of(word).tile.is_square
        wanted = bool(casts.row), bool(casts.column)
        new_node = build.call(ops.scales, source, word, *wanted, like=casts.first)
        row, column = (
            build.call(operator.getitem, new_node, index, like=casts.first) if there else None
            for index, there in enumerate(wanted)
        )
        column = row if both else column
    for cast, scale in ((casts.row, row), (casts.column, column)):
        for node in _results(cast, 1):
            assert scale is not None
            node.replace_all_uses_with(scale)
    largest = [casts.largest] if casts.largest is not None else []
    if not (elements or down or largest):
        return
    scales = row if elements or not down else None, column if down else None
    put = _call(build, casts, ops.encode_layouts, source, word, *scales, fnuz, bool(largest))
    put(0, elements)
    put(1, down)
    put(2, largest)


def _blocks(
    build: Builder, key: _Key, casts: _Casts, elements: list[fx.Node], down: list[fx.Node], fnuz: bool
) -> None:
    """Casts with scales of blocks, made again where they were known: a tile has all they follow from.

    Scales come with elements; those that are read alone stay with their cast.
    """
    source, word, _ = key
    along_rows = bool(elements) or (bool(down) and Format.of(word).tile.is_square)
    if not (elements or down):
        return
    put = _call(build, casts, ops.encode_blocks, source, word, bool(elements), bool(down), fnuz)
    put(0, elements)
    put(1, _results(casts.row, 1) if along_rows else [])
    put(2, down)
    put(3, _results(casts.column, 1) if down else [])
