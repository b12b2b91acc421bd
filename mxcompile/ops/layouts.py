"""Operators of FP8 casts in the layouts that an FP8 GEMM reads, from one read of a matrix x[M, N].

    encode_transposed   x, scale → qdata[N, M], contiguous
    scales              x → scales along rows, scales along columns
    encode_layouts      x, scales along rows or columns → qdata[M, N] along rows, qdata[N, M] along columns
    encode_blocks       x → the same with their scales, which follow from one tile alone

"Along rows" contracts the last dimension, "along columns" the first: scales [M, 1] and [1, N] of channels,
[M, ⌈N/128⌉] and [⌈M/128⌉, N] of blocks. Of formats with one scale both ways, a tensor or squares, that along
rows is made for both. Results that are not asked for are empty. `fnuz`: elements of half the value (see
`as_fnuz`). `seen`: the largest magnitude too.

The lowering makes these of `cast`; the implementations are the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats import Format
from mxcompile.formats.encoding import encode_with, scale_shape, scales_of
from mxcompile.ops.define import Spec, define
from mxcompile.ops.general import FNUZ, as_fnuz
from mxcompile.ops.state import largest

_NONE: tuple[int, ...] = (0,)


def _codes(x: Tensor, scale: Tensor, dim: int, form: Format, fnuz: bool) -> Tensor:
    qdata = encode_with(x, scale, dim, form)
    return as_fnuz(qdata) if fnuz else qdata


def _elements(form: Format, fnuz: bool) -> torch.dtype:
    return FNUZ[form.elem.dtype] if fnuz else form.elem.dtype


def _encode_transposed(x: Tensor, block_dim: int, fmt: str, scale: Tensor, fnuz: bool = False) -> Tensor:
    return _codes(x, scale, block_dim, Format.of(fmt), fnuz).t().contiguous()


def _spec_encode_transposed(
    x: Tensor, block_dim: int, fmt: str, scale: Tensor, fnuz: bool = False
) -> list[Spec]:
    return [((x.shape[1], x.shape[0]), _elements(Format.of(fmt), fnuz))]


def _none(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_NONE, dtype=dtype)


def _scales(x: Tensor, fmt: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    form = Format.of(fmt)
    row, column = (
        scales_of(x, dim, form) if wanted else _none(x, form.scale.dtype)
        for dim, wanted in ((-1, rows), (-2, columns))
    )
    return row, column


def _spec_scales(x: Tensor, fmt: str, rows: bool, columns: bool) -> list[Spec]:
    form = Format.of(fmt)
    return [
        (scale_shape(x.shape, dim, form.tile) if wanted else _NONE, form.scale.dtype)
        for dim, wanted in ((-1, rows), (-2, columns))
    ]


def _encode_layouts(
    x: Tensor, fmt: str, row_scale: Tensor | None, column_scale: Tensor | None, fnuz: bool, seen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    form = Format.of(fmt)
    empty = _none(x, _elements(form, fnuz))
    rows = empty if row_scale is None else _codes(x, row_scale, -1, form, fnuz)
    columns = empty.clone() if column_scale is None else _encode_transposed(x, -2, fmt, column_scale, fnuz)
    return rows, columns, largest(x) if seen else _none(x, torch.float32)


def _spec_encode_layouts(
    x: Tensor, fmt: str, row_scale: Tensor | None, column_scale: Tensor | None, fnuz: bool, seen: bool
) -> list[Spec]:
    elements = _elements(Format.of(fmt), fnuz)
    return [
        (_NONE if row_scale is None else x.shape, elements),
        (_NONE if column_scale is None else (x.shape[1], x.shape[0]), elements),
        ((1,) if seen else _NONE, torch.float32),
    ]


def _encode_blocks(
    x: Tensor, fmt: str, rows: bool, columns: bool, fnuz: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    form = Format.of(fmt)
    row, column = _scales(x, fmt, rows or form.tile.is_square, columns and not form.tile.is_square)
    down = (row if form.tile.is_square else column) if columns else None
    codes, transposed, _ = _encode_layouts(x, fmt, row if rows else None, down, fnuz, False)
    return codes, row, transposed, column


def _spec_encode_blocks(x: Tensor, fmt: str, rows: bool, columns: bool, fnuz: bool) -> list[Spec]:
    form = Format.of(fmt)
    row, column = _spec_scales(x, fmt, rows or form.tile.is_square, columns and not form.tile.is_square)
    elements = _elements(form, fnuz)
    codes = x.shape if rows else _NONE
    return [(codes, elements), row, ((x.shape[1], x.shape[0]) if columns else _NONE, elements), column]


encode_transposed = define(
    "encode_transposed(Tensor x, int block_dim, str fmt, Tensor scale, bool fnuz=False) -> Tensor",
    _encode_transposed,
    _spec_encode_transposed,
)
scales = define(
    "scales(Tensor x, str fmt, bool rows, bool columns) -> (Tensor rows, Tensor columns)",
    _scales,
    _spec_scales,
)
encode_layouts = define(
    "encode_layouts(Tensor x, str fmt, Tensor? row_scale, Tensor? column_scale, bool fnuz, bool seen)"
    " -> (Tensor rows, Tensor columns, Tensor largest)",
    _encode_layouts,
    _spec_encode_layouts,
)
encode_blocks = define(
    "encode_blocks(Tensor x, str fmt, bool rows, bool columns, bool fnuz)"
    " -> (Tensor rows, Tensor row_scale, Tensor columns, Tensor column_scale)",
    _encode_blocks,
    _spec_encode_blocks,
)
