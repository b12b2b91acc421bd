"""Inductor templates of FP8 casts with FP32 scales: the amax, and the copies that an FP8 GEMM reads.

    mx_fp8_amax   x[m, n]          →  largest magnitudes of parts of rows, of columns or of the matrix;
                                      Inductor reduces what the tiles leave and makes scales of it
    mx_fp8_cast   x[m, n], scales  →  codes [m, n] under scales of rows, codes [n, m] under those of columns
                  x[m, n]          →  the same and the scales, where a tile has all they follow from (blocks)
    x             ←  prologue         as in `casts`

Hopper's FP8 GEMM contracts the innermost dimension of both operands, so what is cast along columns is stored
transposed, from the same read: through shared memory, by words, since the rows of a tile lie in an order in
which a thread has neighbours of a column (`fp8_tiles.order`). The cast itself is ``kernels.fp8_tiles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, lowerings, register_lowering
from torch._inductor.select_algorithm import (
    SymbolicGridFn,
    TritonTemplate,
    realize_inputs,
)
from torch._inductor.utils import triton_type
from torch.utils._sympy.functions import CeilDiv

from mxcompile import ops
from mxcompile.formats import Format, Tile
from mxcompile.lowering.chips.tiles import TileConfig
from mxcompile.lowering.inductor.general import fp32_scale_of
from mxcompile.lowering.kernels.configs import chosen
from mxcompile.lowering.targets import of_device
from mxcompile.lowering.templates import call
from mxcompile.lowering.templates.producers import ProducingTemplate

_F32 = torch.float32
_VIEW = lowerings[torch.ops.aten.view.default]
_AMAX = lowerings[torch.ops.aten.amax.default]

BLOCK = 128
"""Elements along a block's scale: the side of a tile of the cast."""

PERM = 4
"""Rows that a thread has side by side (see `fp8_tiles.order`)."""

_PLACE = r"""
    M = {{size("X", 0)}}
    N = {{size("X", 1)}}
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    rm = pid_m * BLOCK_M + fp8_tiles.order(BLOCK_M, PERM)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None].to(INDEX_DTYPE)
    idx_n = rn[None, :].to(INDEX_DTYPE)
    mask_m = idx_m < M
    mask = mask_m & (idx_n < N)
    {{load_input("X", "x", ("idx_m", "idx_n"), mask="mask", indent_width=4,
                 index_shape=("BLOCK_M", "BLOCK_N"))}}
    x = x.to(DTYPE).to(tl.float32)
"""

_AMAX_SOURCE = (
    r"""
from mxcompile.lowering.kernels import fp8_tiles, tiles

{% if ROWS and COLUMNS %}
{{def_kernel("X", "COLUMN")}}
{% else %}
{{def_kernel("X")}}
{% endif %}
"""
    + _PLACE
    + r"""
    bits = tiles.magnitude_bits(x)
{% if ROWS and COLUMNS %}
    column = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(COLUMN + pid_m.to(tl.int64) * N + rn, column, mask=rn < N)
{% endif %}
{% if ROWS %}
    part = tl.max(bits, 1, keep_dims=True).to(tl.float32, bitcast=True)
    idx_r = idx_m
    idx_c = pid_n + tl.zeros((1, 1), tl.int32)
    kept = idx_r < M
    {{store_output(("idx_r", "idx_c"), "part", "kept", val_shape=("BLOCK_M", "1"))}}
{% elif COLUMNS %}
    part = tl.max(bits, 0, keep_dims=True).to(tl.float32, bitcast=True)
    idx_r = pid_m + tl.zeros((1, 1), tl.int32)
    idx_c = idx_n
    kept = idx_c < N
    {{store_output(("idx_r", "idx_c"), "part", "kept", val_shape=("1", "BLOCK_N"))}}
{% else %}
    part = tl.max(tl.max(bits, 1, keep_dims=True), 0, keep_dims=True).to(tl.float32, bitcast=True)
    idx_r = pid_m + tl.zeros((1, 1), tl.int32)
    idx_c = pid_n + tl.zeros((1, 1), tl.int32)
    kept = idx_r < M
    {{store_output(("idx_r", "idx_c"), "part", "kept", val_shape=("1", "1"))}}
{% endif %}
"""
)

_CAST_SOURCE = (
    r"""
from mxcompile.lowering.kernels import fp8_tiles, tiles

{% set names = ["X"] %}
{% if ROWS or SAME %}
{% set names = names + ["ROW_SCALE"] %}
{% endif %}
{% if COLUMNS and not SAME %}
{% set names = names + ["COLUMN_SCALE"] %}
{% endif %}
{% if ROWS and COLUMNS %}
{% set names = names + ["COLUMN"] %}
{% endif %}
{% if SEEN %}
{% set names = names + ["LARGEST"] %}
{% endif %}
{{def_kernel(*names)}}
"""
    + _PLACE
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
    column_codes = fp8_tiles.held(codes)
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


@SymbolicGridFn
def _grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, int]:
    return cdiv(m, meta["BLOCK_M"]), cdiv(n, meta["BLOCK_N"]), 1


AMAX = ProducingTemplate(name="mx_fp8_amax", grid=_grid, source=_AMAX_SOURCE)
CAST = ProducingTemplate(name="mx_fp8_cast", grid=_grid, source=_CAST_SOURCE)


@register_lowering(ops.scales, type_promotion_kind=None)
def lower_scales(x: ir.TensorBox, fmt: str, rows: bool, columns: bool) -> tuple[ir.TensorBox | None, ...]:
    """Scales along rows and along columns, None where there are none."""
    form = Format.of(fmt)
    assert form.tile in (Tile.TENSOR, Tile.CHANNEL), f"{form.tile} scales are made by their cast"
    whole = form.tile == Tile.TENSOR
    parts = _parts(x, rows=rows and not whole, columns=columns and not whole)
    along = ((0, 1), ()) if whole else ((1,), (0,))
    return tuple(
        None if part is None else _scale(_AMAX(part, dims, True), form)
        for part, dims in zip(parts, along, strict=True)
    )


def _scale(amax: ir.TensorBox, form: Format) -> ir.TensorBox:
    load = amax.make_loader()
    quotient = ir.Pointwise.create(
        device=amax.get_device_or_error(),
        dtype=_F32,
        inner_fn=lambda index: fp32_scale_of(load(index), form),
        ranges=amax.get_size(),
    )
    quotient.realize()
    result: ir.TensorBox = quotient
    return result


def _parts(x: ir.TensorBox, *, rows: bool, columns: bool) -> tuple[ir.TensorBox | None, ...]:
    """Largest magnitudes of parts of rows and of columns, or of parts of the matrix if of neither."""
    x = realize_inputs(x)
    (m, n), target = x.get_size(), of_device(x.get_device_or_error())
    tile = chosen(target.tiles.fp8_cast, "an FP8 cast", target).amax
    down, across = CeilDiv(m, tile.block_m), CeilDiv(n, tile.block_n)
    others = [_empty(x, [down, n], _F32)] if rows and columns else []
    shape = [m if rows else down, n if columns and not rows else across]
    result = _call(AMAX, x, others, shape, _F32, tile, ROWS=rows, COLUMNS=columns, PERM=1)
    if rows and columns:
        return result, others[0]
    return (None, result) if columns else (result, None)


@register_lowering(ops.encode_layouts, type_promotion_kind=None)
def lower_encode_layouts(
    x: ir.TensorBox,
    fmt: str,
    row_scale: ir.TensorBox | None,
    column_scale: ir.TensorBox | None,
    fnuz: bool,
    seen: bool,
) -> tuple[ir.TensorBox | None, ...]:
    """Elements along rows, along columns, and the largest magnitude; None what is not asked for."""
    rows, columns = row_scale is not None, column_scale is not None
    same = Format.of(fmt).tile == Tile.TENSOR
    scales = [row_scale] if rows else []
    scales += [column_scale] if columns and not (same and rows) else []
    codes, down, largest = _cast(
        x, fmt, [realize_inputs(scale) for scale in scales], rows, columns, fnuz, same=same, seen=seen
    )
    return codes, down, None if largest is None else _VIEW(_AMAX(largest, (0,), True), [1])


@register_lowering(ops.encode_blocks, type_promotion_kind=None)
def lower_encode_blocks(
    x: ir.TensorBox, fmt: str, rows: bool, columns: bool, fnuz: bool
) -> tuple[ir.TensorBox | None, ...]:
    """Elements and scales along rows, then along columns; None what is not asked for."""
    form = Format.of(fmt)
    assert form.tile.along == BLOCK, f"a tile of the kernel holds blocks of {BLOCK}"
    m, n = x.get_size()
    same = form.tile.is_square
    row = _empty(x, [CeilDiv(m, form.tile.across), CeilDiv(n, BLOCK)], _F32) if rows or same else None
    column = _empty(x, [CeilDiv(m, BLOCK), n], _F32) if columns and not same else None
    scales = [scale for scale in (row, column) if scale is not None]
    codes, down, _ = _cast(x, fmt, scales, rows, columns, fnuz, same=same, own=True)
    return codes, row, down, column


def _cast(
    x: ir.TensorBox,
    fmt: str,
    scales: list[ir.TensorBox],
    rows: bool,
    columns: bool,
    fnuz: bool,
    *,
    same: bool,
    own: bool = False,
    seen: bool = False,
) -> tuple[ir.TensorBox | None, ...]:
    """Elements along rows and columns, and the largest magnitude of every tile.

    scales: read, or written if a tile makes its `own`. same: one serves both.
    """
    x = realize_inputs(x)
    form, (m, n), target = Format.of(fmt), x.get_size(), of_device(x.get_device_or_error())
    tiles = chosen(target.tiles.fp8_cast, "an FP8 cast", target)
    tile = tiles.blocks if own else tiles.cast
    stored = ops.FNUZ[form.elem.dtype] if fnuz else form.elem.dtype
    other = [_empty(x, [n, m], stored)] if rows and columns else []
    number = CeilDiv(m, tile.block_m) * CeilDiv(n, tile.block_n)
    largest = [_empty(x, [number], _F32)] if seen else []
    given = [] if own else scales
    result = _call(
        CAST,
        x,
        [*scales, *other, *largest],
        [m, n] if rows else [n, m],
        stored,
        tile,
        read=len(given),
        ROWS=rows,
        COLUMNS=columns,
        SAME=same,
        OWN=own,
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
    down = (other[0] if rows else result) if columns else None
    return result if rows else None, down, largest[0] if seen else None


def _empty(x: ir.TensorBox, shape: Sequence[Any], dtype: torch.dtype) -> ir.TensorBox:
    """Memory that a kernel writes beside its result."""
    result: ir.TensorBox = empty_strided(list(shape), None, dtype=dtype, device=x.get_device_or_error())
    result.realize()
    return result


def _call(
    template: TritonTemplate,
    x: ir.TensorBox,
    others: Sequence[ir.TensorBox],
    shape: Sequence[Any],
    dtype: torch.dtype,
    tile: TileConfig,
    *,
    read: int = 0,
    **settings: Any,
) -> ir.TensorBox:
    """The result of `template`, of `shape`. others: beside `x`, the first `read` of them only read."""
    inputs: list[Any] = [x, *others[:read], *(other.data for other in others[read:])]
    return call.only(
        template,
        inputs,
        ir.FixedLayout(x.get_device_or_error(), dtype, list(shape)),
        written=inputs[1 + read :],
        call_sizes=x.get_size(),
        num_stages=1,
        num_warps=tile.num_warps,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        DTYPE=triton_type(x.get_dtype()),
        **settings,
    )
