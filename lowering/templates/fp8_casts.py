"""Inductor templates of FP8 casts with FP32 scales: the amax, and the copies that an FP8 GEMM reads.

    mx_fp8_amax   x[m, n]          →  largest magnitudes of parts of rows, of columns or of the matrix;
                                      Inductor reduces these, and computes the scales
    mx_fp8_cast   x[m, n], scales  →  codes [m, n] under scales of rows, codes [n, m] under scales of columns
                  x[m, n]          →  the same and the scales, if they belong to blocks, which tiles contain
    x             ←  prologue         as in `casts`

Hopper's FP8 GEMM contracts the innermost dimension of both operands, so the columnwise copy is stored
transposed, from the same read. It passes through shared memory by words, because the rows of a tile are in an
order in which a thread has neighbours of a column (`fp8_tiles.order`). ``kernels.fp8_tiles`` has the cast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import reduce_amax, view
from torch._inductor.select_algorithm import TritonTemplate, realize_inputs
from torch._inductor.utils import triton_type
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import CeilDiv

from mxcompile.formats import FNUZ, Copy, CopyPart, Format, ScaleType, Tile
from mxcompile.lowering.chips.tiles import TileConfig, Unsupported
from mxcompile.lowering.choices.configs import chosen
from mxcompile.lowering.inductor.blocks import elementwise
from mxcompile.lowering.inductor.copies import CastCall
from mxcompile.lowering.inductor.scales import fp32_scale_of
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.producers import TILE_INDICES, ProducingTemplate, grid
from mxcompile.ops import Spec

_F32 = torch.float32

BLOCK = 128
"""Elements along a block's scale: the side of a tile of the cast."""

PERM = 4
"""Neighbouring rows that a thread has (see `fp8_tiles.order`)."""

_TILE_INDICES = (
    TILE_INDICES.replace("tl.arange(0, BLOCK_M)", "fp8_tiles.order(BLOCK_M, PERM)")
    + r"""    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask_m = idx_m < M
    mask = mask_m & (idx_n < N)
    {{load_input("X", "x", ("idx_m", "idx_n"), mask="mask", indent_width=4,
                 index_shape=("BLOCK_M", "BLOCK_N"))}}
    x = x.to(DTYPE).to(tl.float32)
"""
)

_AMAX_SOURCE = (
    r"""
from mxcompile.lowering.kernels import fp8_tiles, tiles

{{def_kernel("X", *(["COLUMN"] if ROWS and COLUMNS else []))}}
"""
    + _TILE_INDICES
    + r"""
    bits = tiles.magnitude_bits(x)
{% if ROWS and COLUMNS %}
    column = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(COLUMN + pid_m.to(tl.int64) * N + rn, column, mask=rn < N)
{% endif %}
{% set down = COLUMNS and not ROWS %}
{% if ROWS or COLUMNS %}
    part = tl.max(bits, {{1 if ROWS else 0}}, keep_dims=True).to(tl.float32, bitcast=True)
{% else %}
    part = tl.max(tl.max(bits, 1, keep_dims=True), 0, keep_dims=True).to(tl.float32, bitcast=True)
{% endif %}
    idx_r = {{"idx_m" if ROWS else "pid_m + tl.zeros((1, 1), tl.int32)"}}
    idx_c = {{"idx_n" if down else "pid_n + tl.zeros((1, 1), tl.int32)"}}
    kept = {{"idx_c < N" if down else "idx_r < M"}}
    {{store_output(("idx_r", "idx_c"), "part", "kept",
                   val_shape=("BLOCK_M" if ROWS else "1", "BLOCK_N" if down else "1"))}}
"""
)

_CAST_SOURCE = (
    r"""
from mxcompile.lowering.kernels import fp8_tiles, tiles

{% set names = ["X"] + (["ROW_SCALE"] if ROWS or SAME else [])
               + (["COLUMN_SCALE"] if COLUMNS and not SAME else [])
               + (["COLUMN"] if ROWS and COLUMNS else []) + (["LARGEST"] if SEEN else []) %}
{{def_kernel(*names)}}
"""
    + _TILE_INDICES
    + r"""
{% if SEEN %}
    seen = tl.max(tl.max(tiles.magnitude_bits(x), 1), 0).to(tl.float32, bitcast=True)
    tl.store(LARGEST + pid_m * tl.cdiv(N, BLOCK_N) + pid_n, seen)
{% endif %}
{% if ROWS or SAME %}
{% if OWN %}
    row_scale = fp8_tiles.scale_of(fp8_tiles.block_amax(x, SAME), ELEM, POW2)
{% if SAME %}
    tl.store(ROW_SCALE + pid_m * tl.cdiv(N, BLOCK_N) + pid_n + tl.zeros((1, 1), tl.int32), row_scale)
{% else %}
    tl.store(ROW_SCALE + idx_m * tl.cdiv(N, BLOCK_N) + pid_n, row_scale, mask=idx_m < M)
{% endif %}
{% elif SAME %}
    row_scale = tl.load(ROW_SCALE + tl.zeros((1, 1), tl.int32))
{% else %}
    row_scale = tl.load(ROW_SCALE + idx_m, mask=idx_m < M, other=1.0)
{% endif %}
    power, scaled, inverse = fp8_tiles.parts(row_scale)
    y = fp8_tiles.quotient(x, power, scaled, inverse, ELEM, WIDE, STATEFUL)
    codes = fp8_tiles.encode(y, ELEM, NATIVE, SATURATES, FNUZ)
{% endif %}
{% if COLUMNS %}
{% if SAME %}
    column_codes = fp8_tiles.barrier(codes)
{% else %}
{% if OWN %}
    column_scale = fp8_tiles.scale_of(fp8_tiles.column_amax(x), ELEM, POW2)
    tl.store(COLUMN_SCALE + pid_m.to(tl.int64) * N + idx_n, column_scale, mask=idx_n < N)
{% else %}
    column_scale = tl.load(COLUMN_SCALE + idx_n, mask=idx_n < N, other=1.0)
{% endif %}
    power, scaled, inverse = fp8_tiles.parts(column_scale)
    y = fp8_tiles.quotient(x, power, scaled, inverse, ELEM, WIDE, STATEFUL)
    column_codes = fp8_tiles.encode(y, ELEM, NATIVE, SATURATES, FNUZ)
{% endif %}
    down = fp8_tiles.as_stored(fp8_tiles.transposed(column_codes, PERM), STORED)
    idx_t = rn[:, None].to(INDEX_DTYPE)
    idx_u = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    inside = (idx_t < N) & (idx_u < M)
{% if ROWS %}
    tl.store(COLUMN + idx_t.to(INDEX) * M + idx_u, down, mask=inside)
{% else %}
    {{store_output(("idx_t", "idx_u"), "down", "inside", val_shape=("BLOCK_N", "BLOCK_M"))}}
{% endif %}
{% endif %}
{% if ROWS %}
    qdata = fp8_tiles.as_stored(codes, STORED)
    {{store_output(("idx_m", "idx_n"), "qdata", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
{% endif %}
"""
)


AMAX = ProducingTemplate(name="mx_fp8_amax", grid=grid, source=_AMAX_SOURCE)
CAST = ProducingTemplate(name="mx_fp8_cast", grid=grid, source=_CAST_SOURCE)


_Scales = dict[int, ir.TensorBox]
"""Scales by the dimension that they belong to; scales of squares and of tensors serve both, and have −1."""

_Tensors = dict[tuple[CopyPart, int], ir.TensorBox]
"""Tensors by part, and by dimension (scales) or by whether they are transposed (others)."""


def lower_cast(cast: CastCall) -> list[ir.TensorBox] | None:
    """Returns the tensors of each copy; None if scales are not FP32, or if a loop of Inductor is as fast.

    A loop makes a single copy of scales, or of elements that are not transposed, and fuses with neighbours.
    """
    copies, (first, *more) = cast.copies, cast.copies
    form = first.format
    is_loop = not (more or first.transposed or first.fnuz or first.part is CopyPart.LARGEST)
    if form.scale is not ScaleType.FP32 or is_loop or any(copy.part is CopyPart.CODES for copy in copies):
        return None
    if isinstance(of_device(cast.x.get_device_or_error()).tiles.fp8_cast, Unsupported):
        return None
    assert all(copy.format == form for copy in more), f"one kernel makes copies of one format, not {copies}"
    elements = {copy.transposed: copy for copy in copies if copy.part is CopyPart.ELEMENTS}
    cast_scales = {
        _side(copy): scale for copy, scale in zip(copies, cast.scales, strict=True) if scale is not None
    }
    sides = {_side(copy) for copy in copies if copy.part is not CopyPart.LARGEST} - cast_scales.keys()
    new_scales = {} if form.tile.along == BLOCK else _scales(cast.x, form, sides)
    scales = cast_scales | new_scales
    tensors: _Tensors = {(CopyPart.SCALES, side): scale for side, scale in scales.items()}
    if elements:
        tensors |= _cast(cast, scales, elements)
    else:
        tensors[CopyPart.LARGEST, False] = view(reduce_amax(_parts(cast.x)[0], (0, 1), True), [1])
    if new_scales and elements:  # the amax kernel computed the producer of x, and stored x
        cast_only: Any = tensors[CopyPart.ELEMENTS, False not in elements]
        cast_only.data.data.origins = OrderedSet([V.graph.current_node])
    keys = ((copy, _side(copy) if copy.part is CopyPart.SCALES else copy.transposed) for copy in copies)
    return [tensors[copy.part, key] for copy, key in keys]


def _side(copy: Copy) -> int:
    """Returns the dimension that the scales of `copy` belong to."""
    return -1 if copy.format.tile.is_square else copy.dim


def _scales(x: ir.TensorBox, form: Format, sides: Collection[int]) -> _Scales:
    """Returns the scales of `x` per tensor or per channel, by the dimension that they belong to."""
    if not sides:
        return {}
    whole = form.tile == Tile.TENSOR
    parts = _parts(x, rows=-1 in sides and not whole, columns=-2 in sides and not whole)
    along = ((0, 1), ()) if whole else ((1,), (0,))
    return {
        side: _scale(reduce_amax(part, dims, True), form)
        for side, part, dims in zip((-1, -2), parts, along, strict=True)
        if part is not None
    }


def _scale(amax: ir.TensorBox, form: Format) -> ir.TensorBox:
    load = amax.make_loader()
    device, sizes = amax.get_device_or_error(), list(amax.get_size())
    scale = elementwise(device, _F32, lambda index: fp32_scale_of(load(index), form), sizes)
    scale.realize()
    return scale


def _parts(x: ir.TensorBox, *, rows: bool = False, columns: bool = False) -> tuple[ir.TensorBox | None, ...]:
    """Returns the amaxes of parts of rows and of columns; if neither is requested, of parts of `x`."""
    x = realize_inputs(x)
    (m, n), target = x.get_size(), of_device(x.get_device_or_error())
    tile = chosen(target.tiles.fp8_cast, "an FP8 cast", target).amax
    down, across = CeilDiv(m, tile.block_m), CeilDiv(n, tile.block_n)
    shapes = [[m if rows else down, n if columns and not rows else across]]
    shapes += [[down, n]] if rows and columns else []
    specs = [(shape, _F32) for shape in shapes]
    parts = _call(AMAX, [x], specs, tile, ROWS=rows, COLUMNS=columns, PERM=1)
    if rows and columns:
        return tuple(parts)
    return (None, *parts) if columns else (*parts, None)


def _cast(cast: CastCall, scales: _Scales, elements: dict[bool, Copy]) -> _Tensors:
    """Returns the tensors that one kernel makes for the copies `elements`; among them scales of blocks.

    scales: other scales, which the kernel reads.
    """
    form = cast.copies[0].format
    same, is_blocked = form.tile.is_square, form.tile.along == BLOCK
    rows, columns = False in elements, True in elements
    sides = [side for side, is_used in ((-1, rows or same), (-2, columns and not same)) if is_used]
    x = realize_inputs(cast.x)
    (m, n), target = x.get_size(), of_device(x.get_device_or_error())
    tiles = chosen(target.tiles.fp8_cast, "an FP8 cast", target)
    tile = tiles.blocks if is_blocked else tiles.cast
    (fnuz,) = {copy.fnuz for copy in elements.values()}  # one kernel makes elements of one type
    stored = FNUZ[form.elem.dtype] if fnuz else form.elem.dtype
    seen = any(copy.part is CopyPart.LARGEST for copy in cast.copies)
    shapes: dict[int, list[Any]] = {}
    if is_blocked:
        shapes = {-1: [CeilDiv(m, form.tile.across), CeilDiv(n, BLOCK)], -2: [CeilDiv(m, BLOCK), n]}
    results: dict[tuple[CopyPart, int], Spec] = {
        (CopyPart.ELEMENTS, not rows): ([m, n] if rows else [n, m], stored),
        **{(CopyPart.SCALES, side): (shape, _F32) for side, shape in shapes.items() if side in sides},
    }
    if rows and columns:
        results[CopyPart.ELEMENTS, True] = ([n, m], stored)
    if seen:
        results[CopyPart.LARGEST, False] = ([CeilDiv(m, tile.block_m) * CeilDiv(n, tile.block_n)], _F32)
    tensors = _call(
        CAST,
        [x] if is_blocked else [x, *(realize_inputs(scales[side]) for side in sides)],
        list(results.values()),
        tile,
        ROWS=rows,
        COLUMNS=columns,
        SAME=same,
        OWN=is_blocked,
        SEEN=seen,
        PERM=PERM if columns else 1,
        ELEM=repr(form.elem.name),
        STORED=repr(form.elem.name + ("fnuz" if fnuz else "")),
        WIDE=x.get_dtype() is _F32,
        STATEFUL=form.amax.stateful,
        POW2=form.pow2,
        NATIVE=target.encodes_fp8,
        SATURATES=target.saturates_fp8,
        FNUZ=fnuz,
        INDEX="tl.int64",
    )
    if seen:
        tensors[-1] = view(reduce_amax(tensors[-1], (0,), True), [1])
    return dict(zip(results, tensors, strict=True))


def _call(
    template: TritonTemplate, inputs: list[Any], results: Sequence[Spec], tile: TileConfig, **settings: Any
) -> list[ir.TensorBox]:
    """Returns the results of a template for the matrix that is the first of `inputs`."""
    x = inputs[0]
    return call.only(
        template,
        inputs,
        results,
        call_sizes=x.get_size(),
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DTYPE=triton_type(x.get_dtype()),
        **settings,
    )
