"""merge_casts: merge the casts of a tensor to one format, and the kernels that compute its amax.

    cast(x, [codes @−1]), cast(x, [codes @−2])      →  cast(x, [both])             one read of x
    cast(x, [values @−1]), cast(x, [codes @−2])     →  cast(x, [both])
    cast(x, [packed @−1]), cast(x, [packed @−2])    →  cast(x, [both])
    cast(x, [codes @−1]), cast(x, [elements @−2 transposed], scales=[its own])
                              FP32 scales           →  cast(x, [elements, scales, elements transposed])
    largest(x), cast(x, [largest of its transform]) →  cast(x, [both])

Applies to chips whose casts are templates, which make copies in MXFP8, in packed FP4 and with FP32 scales. A
cast that is a loop fuses with its neighbours, so merging gains nothing. Chips without an MX GEMM multiply
values; values of square tiles are equal in both layouts, so their casts stay. Stochastic copies are not
merged, because their random numbers use the registers of a second copy. Two copies are also not merged
if the amax of one copy is computed after the other cast.

A copy with FP32 scales is split into parts: its scales may be known before the cast (delayed scaling), its
elements may have another type (`FNUZ`), and columnwise elements may be transposed (see `vendor_fp8`)
while their scales are not. The merged cast computes known block scales again, because its tile has all their
inputs. Three kinds of casts stay as they are: casts whose elements no node reads; casts that an emulated
product reads, because one loop makes elements and values; casts to rowwise elements with a known scale,
because they fuse with their neighbours, also as an epilogue.

Runs after `expand`. Numerics do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.formats import FNUZ, WHOLE, AmaxKind, Copy, CopyPart, Format, Tile
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import is_empty, tensor
from mxcompile.graph.transpose import readers
from mxcompile.lowering import optional
from mxcompile.lowering.choices.configs import is_one_matrix
from mxcompile.lowering.choices.families import TABLE, Family
from mxcompile.lowering.graph.lowering_pass import CASTS, FP8_CASTS, LoweringPass
from mxcompile.ops.view import Cast, Decode, result_of, results_of

_FP8_TILES = (Tile.TENSOR, Tile.CHANNEL, Tile(1, 128), Tile(128, 128))

_Group = dict[int, Cast]
"""Casts of one tensor to one format, by their dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _NewCopy:
    """A copy of a merged cast. results: the replaced nodes, for each tensor. scale, amax: see `Cast`."""

    copy: Copy
    results: Sequence[Sequence[fx.Node]]
    scale: fx.Node | None = None
    amax: fx.Node | None = None


class MergeCasts(LoweringPass):
    """Merges casts of a tensor, on GPUs that multiply MXFP8 (and packed FP4) or FP8, or emulate MXFP8."""

    @property
    def applies(self) -> bool:
        """Whether casts to FP8 have templates."""
        return self.target.arch is not None or bool(self.target.fp8_tiles)

    @property
    def obstacle(self) -> str:
        """The reason why the templates of casts cannot be used, or ""."""
        of_fp8 = FP8_CASTS if self.target.fp8_tiles else ()
        return optional.obstacle(*CASTS, *of_fp8)

    def apply(self, graph: fx.Graph) -> None:
        """Merges the casts of `graph`, each at the first cast of its tensor."""
        build = Builder(graph, self.name)
        for cast in list(Cast.calls(graph)):
            # `mx.largest` of a tensor joins the cast that computes the amax of its Hadamard transform
            plain = next((user for user in cast.x.users if user.target is ops.largest), None)
            if cast.copy.part is CopyPart.LARGEST and plain is not None:
                copy = replace(cast.copy, format=cast.form.untransformed)
                _write(build, cast.x, [_single(copy, [plain]), _whole(cast)], min(plain, cast.node))
        for group in self._groups(graph):
            copies = [_whole(group[side]) for side in (-1, -2)]
            _write(build, group[-1].x, copies, _first(group.values()))
        if self.target.fp8_tiles:
            dead.eliminate(graph)  # views of elements whose transposed copy is read instead
            for (source, form, scale), casts in _of_fp8(graph).items():
                if parts := _parts(casts, source, form, scale):
                    _write(build, source, parts, _first(casts))

    def _groups(self, graph: fx.Graph) -> list[_Group]:
        """Returns pairs of casts of `graph` to MXFP8 or packed FP4 that a template makes in one kernel."""
        groups: dict[Any, list[_Group]] = {}
        for cast in filter(self._takes, Cast.calls(graph)):
            alone = cast.node if cast.form.stochastic else None
            waiting = groups.setdefault((cast.x, cast.form.untransformed, cast.copy.layout, alone), [])
            group = next((group for group in waiting if _fits(group, cast)), None)
            if group is None:
                waiting.append(group := {})
            group[cast.side] = cast
        return [group for waiting in groups.values() for group in waiting if len(group) > 1]

    def _takes(self, cast: Cast) -> bool:
        """Whether a template makes the copy of `cast` together with another copy."""
        copy, value = cast.copy, tensor(cast.x)
        if copy.format.packed:
            return copy.part is CopyPart.CODES
        if value is None or value.ndim < 2 or not copy.is_mx or copy.is_square or copy.dim not in (-1, -2):
            return False
        if not self.target.emulates:
            return copy.dtype is None
        if value.device.type != self.device or copy.is_tiled or not cast.node.users:
            return False
        return value.dtype.is_floating_point and is_one_matrix(value.shape, copy.dim)


def is_fp8(cast: Cast) -> bool:
    """Whether `cast` is a whole copy with FP32 scales that a template makes."""
    form, value = cast.form, tensor(cast.x)
    if cast.copy != Copy(format=form, dim=cast.side):  # a part of it, or values
        return False
    if value is None or value.ndim != 2 or not TABLE[Family.FP8].takes([form]):
        return False
    if form.stochastic or form.amax.kind is AmaxKind.PERCENTILE or form.tile not in _FP8_TILES:
        return False
    return not is_empty(value.shape)


def _fits(group: _Group, cast: Cast) -> bool:
    """Whether `cast` may join `group`: along a new dimension, to the same dtype, with inputs before it."""
    dtypes = {member.copy.dtype for member in (*group.values(), cast)} - {None}
    first = _first(group.values())
    ready = all(node < first for node in cast.node.all_input_nodes)
    return ready and cast.side not in group and len(dtypes) <= 1


def _first(casts: Iterable[Cast]) -> fx.Node:
    return min(cast.node for cast in casts)


def _whole(cast: Cast) -> _NewCopy:
    results = dict(results_of(cast.node))
    nodes = [[results[index]] if index in results else [] for index in range(len(cast.node.meta["val"]))]
    return _NewCopy(copy=cast.copy, results=nodes, amax=cast.amax)


def _write(build: Builder, source: fx.Node, copies: Sequence[_NewCopy], first: fx.Node) -> None:
    """Writes one cast of `source` in front of `first`, which makes `copies`."""
    scales, amaxes = [new.scale for new in copies], [new.amax for new in copies]
    options = (scales if any(scales) else None, amaxes if any(amaxes) else None)
    arguments = (None, 0, *options) if any(options) else ()
    with build.graph.inserting_before(first):
        new_node = build.call(ops.cast, source, [str(new.copy) for new in copies], *arguments, like=first)
        results = build.results(new_node)
    replaced = [nodes for new in copies for nodes in new.results]
    for nodes, result in zip(replaced, results, strict=True):
        for node in nodes:
            node.replace_all_uses_with(result)


_Key = tuple[fx.Node, Format, fx.Node | None]
"""Matrix, format, and the scale if it is known before the cast."""


def _of_fp8(graph: fx.Graph) -> dict[_Key, list[Cast]]:
    """Returns the casts with FP32 scales that templates can make, in groups that one kernel may serve."""
    casts: dict[_Key, list[Cast]] = {}
    for cast in Cast.calls(graph):
        scale = cast.scale
        # columnwise elements that are read without a transpose
        along_columns = not _is_along_rows(cast) and _read(cast, 0)
        if _is_down(cast):
            maker = Cast.from_node(result_of(scale)[0])
            scale = None if maker is not None and maker.scale is None else scale
        elif not is_fp8(cast) or along_columns or _is_dequantized(cast):
            continue
        casts.setdefault((cast.x, cast.form, scale), []).append(cast)
    return casts


def _is_down(cast: Cast) -> bool:
    """Whether `cast` makes only transposed elements, from scales that another node computes."""
    return cast.copy.transposed and cast.copy.part is CopyPart.ELEMENTS


def _is_along_rows(cast: Cast) -> bool:
    """Whether `cast` is rowwise, or its scales are equal in both layouts."""
    return cast.side == -1 or cast.form.tile.is_square


def _is_dequantized(cast: Cast) -> bool:
    """Whether an emulated product reads values that are computed from the results of `cast`."""
    users = [user for _, result in results_of(cast.node) for user, _ in readers(result)]
    casts = filter(None, map(Cast.from_node, users))
    decoded = (user for user in users if Decode.from_node(user) and not _makes_fnuz(user))
    return any(decoded) or any(values.copy.dtype is not None for values in casts)


def _read(cast: Cast, index: int) -> list[fx.Node]:
    """Returns the getitem nodes of result `index` of `cast` that other nodes read."""
    return [result for position, result in results_of(cast.node) if position == index and result.users]


def _parts(casts: Sequence[Cast], source: fx.Node, form: Format, scale: fx.Node | None) -> list[_NewCopy]:
    """Returns the copies that replace `casts` of a matrix; [] if loops are as fast. scale: see `_Key`."""
    rows = [cast for cast in casts if not _is_down(cast) and _is_along_rows(cast)]
    columns = [cast for cast in casts if not _is_down(cast) and not _is_along_rows(cast)]
    elements = [node for cast in rows for node in _read(cast, 0)]
    users = [user for node in elements for user in node.users]
    fnuz = bool(users) and all(map(_makes_fnuz, users))
    # a kernel makes elements of one type: transposed elements of another type keep their cast
    down = [cast for cast in casts if _is_down(cast) and (not elements or cast.copy.fnuz is fnuz)]
    largest = [] if scale is None or not form.amax.stateful else _largest(source, _first(casts))
    if not (elements or down or largest) or (scale is not None and not (fnuz or down or largest)):
        return []
    whole = form.tile.along == WHOLE
    whole_scale = scale if whole else None
    row_scales, column_scales = (
        [node for cast in side_casts for node in _read(cast, 1)] for side_casts in (rows, columns)
    )
    parts = []
    if elements:
        copy = Copy(format=form, part=CopyPart.ELEMENTS, fnuz=fnuz)
        parts.append(_single(copy, users if fnuz else elements, whole_scale))
    if whole_scale is None and (elements or (row_scales and (whole or (down and form.tile.is_square)))):
        parts.append(_single(Copy(format=form, part=CopyPart.SCALES), row_scales))
    if down:
        copy = replace(down[0].copy, dim=-2)
        parts.append(_single(copy, [node for cast in down for node in _read(cast, 0)], whole_scale))
    if whole_scale is None and column_scales and (whole or down):
        parts.append(_single(Copy(format=form, dim=-2, part=CopyPart.SCALES), column_scales))
    if largest:
        parts.append(_single(Copy(format=form, part=CopyPart.LARGEST), largest))
    return parts


def _makes_fnuz(node: fx.Node) -> bool:
    decode = Decode.from_node(node)
    return decode is not None and decode.dtype in FNUZ.values()


def _single(copy: Copy, nodes: Sequence[fx.Node], scale: fx.Node | None = None) -> _NewCopy:
    """Returns a copy of one tensor, which replaces `nodes`."""
    return _NewCopy(copy=copy, results=[nodes], scale=scale)


def _largest(source: fx.Node, first: fx.Node) -> list[fx.Node]:
    """Returns the ``mx.largest`` of `source`, in a list, if all its readers come after `first`."""
    asking = (user for user in source.users if user.target is ops.largest)
    return [node for node in asking if all(user > first for user in node.users)][:1]
