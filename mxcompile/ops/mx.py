"""The operators of OCP MXFP8, which have kernels of their own.

All are functional and return contiguous tensors. Scales are E8M0 bytes as uint8, one a block, row-major.
Those of a matrix may be tiled instead (see `scale_tiles`), if the cast is told so: a vector, which products
and `dequantize` know by its rank. The implementations here are the reference; a compiled graph runs what
`lowering` makes of the operators instead.

    quantize             x → qdata, scale along one dimension
    quantize_both        x → qdata, scale along −1; qdata, scale along −2 (one read)
    quantize_two         the same of x, then of y, which are computed from the same tensors
    quantize_operands    for x, then y if there is one, along −1, then −2: qdata and scale, or the value, or
                         that of squares, or nothing (one read); what is not asked for is empty
    dequantize           qdata, scale → x; of a weight stored in another format, with its word, packed → x;
                         one of two levels has a global scale, without which x is that many times as large
    dequantize_tiles     qdata, scale of 32×32 tiles → x
    quantize_dequantize  x → dequantize(quantize(x)), without FP8 in between
    scaled_mm            a[…, M, K] · b[…, K, N] (+ bias[N]), blocks along K, FP32 accumulation
    weight_only_mm       x[M, K] · dequantize(w[N, K])ᵀ (+ bias[N]), FP32 accumulation; w as for dequantize
    scaled_grouped_mm    one GEMM per group, the groups given by `offs` as in `aten._grouped_mm`
    quantize_mm          scaled_mm(quantize(x), b) (+ bias[N]) of matrices, x cast where it is multiplied
    grouped_mm           the same of operands that are not MX data, in any floating-point dtype
    flatten              x → the same elements, one dimension (see `passes/flatten.py`)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mxcompile import formats
from mxcompile.errors import FormatError
from mxcompile.formats import Format, ScaleLayout, num_blocks
from mxcompile.formats.encoding import decode_tensors, dequantize_tensors, quantize_tensors, unpack
from mxcompile.formats.scale_tiles import tile_scale, tiled_length, untile_scale
from mxcompile.ops.define import Spec, define


def is_tiled(x: Tensor, word: str) -> bool:
    """Whether the scales of `x` are to be tiled; `FormatError` for a tensor that is not a matrix."""
    tiled = formats.scale_layout(word) is ScaleLayout.TILED_128X4
    if tiled and x.ndim != 2:
        raise FormatError(
            f"scales of a tensor of {x.ndim} dimensions cannot be tiled: only those of a matrix"
        )
    return tiled


def _quantize(
    x: Tensor,
    block_dim: int,
    elem_dtype: torch.dtype,
    rounding: str,
    square: bool = False,
    scale_layout: str = ScaleLayout.ROW_MAJOR,
) -> tuple[Tensor, Tensor]:
    tiled = is_tiled(x, scale_layout)
    qdata, scale = quantize_tensors(x, block_dim, elem_dtype, rounding, square)
    if not tiled:
        return qdata, scale
    return qdata, tile_scale(scale if block_dim % 2 == 1 else scale.t())


def spec_quantize(
    x: Tensor,
    block_dim: int,
    elem_dtype: torch.dtype,
    rounding: str,
    square: bool = False,
    scale_layout: str = ScaleLayout.ROW_MAJOR,
) -> list[Spec]:
    """Elements and scale bytes of a cast of `x`."""
    scale_shape = list(x.shape)
    scale_shape[block_dim] = num_blocks(scale_shape[block_dim])
    if is_tiled(x, scale_layout):
        scale_shape = [tiled_length(scale_shape[1 - block_dim % 2], scale_shape[block_dim])]
    return [(x.shape, elem_dtype), (scale_shape, torch.uint8)]


def _quantize_both(
    x: Tensor, elem_dtype: torch.dtype, rounding: str, scale_layout: str = ScaleLayout.ROW_MAJOR
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rowwise = _quantize(x, -1, elem_dtype, rounding, False, scale_layout)
    columnwise = _quantize(x, -2, elem_dtype, rounding, False, scale_layout)
    return *rowwise, *columnwise


def _spec_quantize_both(
    x: Tensor, elem_dtype: torch.dtype, rounding: str, scale_layout: str = ScaleLayout.ROW_MAJOR
) -> list[Spec]:
    rowwise = spec_quantize(x, -1, elem_dtype, rounding, False, scale_layout)
    return rowwise + spec_quantize(x, -2, elem_dtype, rounding, False, scale_layout)


def _quantize_two(
    x: Tensor, y: Tensor, elem_dtype: torch.dtype, rounding: str, scale_layout: str = ScaleLayout.ROW_MAJOR
) -> tuple[Tensor, ...]:
    return (
        *_quantize_both(x, elem_dtype, rounding, scale_layout),
        *_quantize_both(y, elem_dtype, rounding, scale_layout),
    )


def _spec_quantize_two(
    x: Tensor, y: Tensor, elem_dtype: torch.dtype, rounding: str, scale_layout: str = ScaleLayout.ROW_MAJOR
) -> list[Spec]:
    first = _spec_quantize_both(x, elem_dtype, rounding, scale_layout)
    return first + _spec_quantize_both(y, elem_dtype, rounding, scale_layout)


_VALUES = ("values", "squares")


def _quantize_operands(
    x: Tensor,
    y: Tensor | None,
    elem_dtype: torch.dtype,
    rounding: str,
    dtype: torch.dtype,
    rows: str,
    columns: str,
) -> tuple[Tensor, ...]:
    results: list[Tensor] = []
    specs = iter(_spec_quantize_operands(x, y, elem_dtype, rounding, dtype, rows, columns))
    for source in (x, y):
        for dim, form in ((-1, rows), (-2, columns)):
            empty = [x.new_empty(shape, dtype=kind) for shape, kind in (next(specs), next(specs))]
            if source is not None and form == "codes":
                results += _quantize(source, dim, elem_dtype, rounding)
            elif source is not None and form in _VALUES:
                square = form == "squares"
                results += [_quantize_dequantize(source, dim, elem_dtype, rounding, square, dtype), empty[1]]
            else:
                results += empty
    return tuple(results)


def _spec_quantize_operands(
    x: Tensor,
    y: Tensor | None,
    elem_dtype: torch.dtype,
    rounding: str,
    dtype: torch.dtype,
    rows: str,
    columns: str,
) -> list[Spec]:
    specs: list[Spec] = []
    for source in (x, y):
        for dim, form in ((-1, rows), (-2, columns)):
            if source is not None and form == "codes":
                specs += spec_quantize(source, dim, elem_dtype, rounding)
            else:
                shape = source.shape if source is not None and form in _VALUES else (0,)
                specs += [(shape, dtype), ((0,), torch.uint8)]
    return specs


def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    block_dim: int,
    dtype: torch.dtype,
    fmt: str = "",
    global_scale: Tensor | None = None,
) -> Tensor:
    if fmt:
        form = Format.of(fmt)
        codes = unpack(qdata, block_dim, form.elem)
        return decode_tensors(codes, scale, block_dim, form, dtype, global_scale=global_scale)
    if qdata.ndim == 2 and scale.ndim == 1:
        rows, blocks = qdata.shape[1 - block_dim % 2], num_blocks(qdata.shape[block_dim])
        scale = untile_scale(scale, rows, blocks)
        scale = scale if block_dim % 2 == 1 else scale.t()
    return dequantize_tensors(qdata, scale, block_dim, dtype)


def unpacked_shape(packed: Tensor, dim: int, fmt: str) -> list[Any]:
    """Shape of the elements of `packed`, in the format `fmt`, bytes of several along `dim`."""
    shape = list(packed.shape)
    shape[dim] = shape[dim] * Format.of(fmt).elem.per_byte
    return shape


def _spec_dequantize(
    qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype, fmt: str = "", *_: Any
) -> list[Spec]:
    return [(unpacked_shape(qdata, block_dim, fmt) if fmt else qdata.shape, dtype)]


def _dequantize_tiles(qdata: Tensor, scale: Tensor, rounding: str, dtype: torch.dtype) -> Tensor:
    rows = scale.repeat_interleave(formats.BLOCK, -2).narrow(-2, 0, qdata.shape[-2])
    return dequantize_tensors(qdata, rows, -1, dtype)


def _spec_dequantize_tiles(qdata: Tensor, scale: Tensor, rounding: str, dtype: torch.dtype) -> list[Spec]:
    return [(qdata.shape, dtype)]


def _quantize_dequantize(
    x: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool, dtype: torch.dtype
) -> Tensor:
    qdata, scale = quantize_tensors(x, block_dim, elem_dtype, rounding, square)
    return dequantize_tensors(qdata, scale, block_dim, dtype)


def _spec_quantize_dequantize(
    x: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool, dtype: torch.dtype
) -> list[Spec]:
    return [(x.shape, dtype)]


def _scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    a = _dequantize(a, scale_a, -1, torch.float32)
    b = _dequantize(b, scale_b, -2, torch.float32)
    return product(a, b, bias, out_dtype)


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, alpha: Tensor | None = None
) -> Tensor:
    """The product of FP32 operands (· alpha) (+ bias), rounded once."""
    out = a @ b if alpha is None else a @ b * alpha
    return (out if bias is None else out + bias).to(out_dtype)


def spec_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *_: Any,
) -> list[Spec]:
    """The product of matrices or batches of them."""
    return [((*a.shape[:-1], b.shape[-1]), out_dtype)]


def _weight_only_mm(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fmt: str = "",
    global_scale: Tensor | None = None,
) -> Tensor:
    weight = _dequantize(qdata, scale, -1, torch.float32, fmt, global_scale)
    return product(x.to(torch.float32), weight.t(), bias, out_dtype)


def _spec_weight_only_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> list[Spec]:
    return [((x.shape[0], qdata.shape[0]), out_dtype)]


def _quantize_mm(
    x: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    elem_dtype: torch.dtype,
    rounding: str,
    out_dtype: torch.dtype,
    qdata: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """`scaled_mm` of `x`, cast along K. qdata, scale: that cast, if the lowering may read it instead."""
    return _scaled_mm(*quantize_tensors(x, -1, elem_dtype, rounding), b, scale_b, bias, out_dtype)


def _spec_quantize_mm(
    x: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    elem_dtype: torch.dtype,
    rounding: str,
    out_dtype: torch.dtype,
    *_: Any,
) -> list[Spec]:
    return [((x.shape[0], b.shape[1]), out_dtype)]


def _scaled_grouped_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    a = dequantize_tensors(a, scale_a, -1, torch.float32)
    b = dequantize_tensors(b, scale_b, -2, torch.float32)
    return grouped_product(a, b, offs).to(out_dtype)


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One product per group of the operands, the groups given by `offs` as in `aten._grouped_mm`.

    Rows and columns past the last group are 0.
    """
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    match a.ndim, b.ndim:
        case 2, 2:
            out = torch.stack([a[:, span] @ b[span] for span in spans])
        case 2, 3:
            out = a.new_zeros(a.shape[0], b.shape[-1])
            for group, span in enumerate(spans):
                out[span] = a[span] @ b[group]
        case 3, 2:
            out = a.new_zeros(a.shape[1], b.shape[-1])
            for group, span in enumerate(spans):
                out[:, span] = a[group] @ b[:, span]
        case _:
            out = a @ b
    return out


def spec_scaled_grouped_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, *_: Any
) -> list[Spec]:
    """The products of groups."""
    return [(_grouped_shape(a, b, offs), out_dtype)]


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[Any, ...]:
    match a.ndim, b.ndim:
        case 2, 2:
            return (offs.shape[0], a.shape[0], b.shape[1])
        case 2, 3:
            return (a.shape[0], b.shape[-1])
        case 3, 2:
            return (a.shape[1], b.shape[-1])
        case _:
            return (*a.shape[:-1], b.shape[-1])


def _spec_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> list[Spec]:
    return [(_grouped_shape(a, b, offs), a.dtype)]


def _flatten(x: Tensor) -> Tensor:
    return x.flatten().clone()


def _spec_flatten(x: Tensor) -> list[Spec]:
    return [([math.prod(x.shape)], x.dtype)]


quantize = define(
    "quantize(Tensor x, int block_dim, ScalarType elem_dtype, str rounding, bool square=False,"
    " str scale_layout='row-major') -> (Tensor qdata, Tensor scale)",
    _quantize,
    spec_quantize,
)
quantize_both = define(
    "quantize_both(Tensor x, ScalarType elem_dtype, str rounding, str scale_layout='row-major') ->"
    " (Tensor qdata_rowwise, Tensor scale_rowwise, Tensor qdata_columnwise, Tensor scale_columnwise)",
    _quantize_both,
    _spec_quantize_both,
)
quantize_two = define(
    "quantize_two(Tensor x, Tensor y, ScalarType elem_dtype, str rounding, str scale_layout='row-major') ->"
    " (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_two,
    _spec_quantize_two,
)
quantize_operands = define(
    "quantize_operands(Tensor x, Tensor? y, ScalarType elem_dtype, str rounding, ScalarType dtype, str rows,"
    " str columns) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantize_operands,
    _spec_quantize_operands,
)
dequantize = define(
    "dequantize(Tensor qdata, Tensor scale, int block_dim, ScalarType dtype, str fmt='',"
    " Tensor? global_scale=None) -> Tensor",
    _dequantize,
    _spec_dequantize,
)
dequantize_tiles = define(
    "dequantize_tiles(Tensor qdata, Tensor scale, str rounding, ScalarType dtype) -> Tensor",
    _dequantize_tiles,
    _spec_dequantize_tiles,
)
quantize_dequantize = define(
    "quantize_dequantize(Tensor x, int block_dim, ScalarType elem_dtype, str rounding, bool square,"
    " ScalarType dtype) -> Tensor",
    _quantize_dequantize,
    _spec_quantize_dequantize,
)
scaled_mm = define(
    "scaled_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    _scaled_mm,
    spec_scaled_mm,
)
weight_only_mm = define(
    "weight_only_mm(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, ScalarType out_dtype, str fmt='',"
    " Tensor? global_scale=None) -> Tensor",
    _weight_only_mm,
    _spec_weight_only_mm,
)
scaled_grouped_mm = define(
    "scaled_grouped_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offs,"
    " ScalarType out_dtype) -> Tensor",
    _scaled_grouped_mm,
    spec_scaled_grouped_mm,
)
quantize_mm = define(
    "quantize_mm(Tensor x, Tensor b, Tensor scale_b, Tensor? bias, ScalarType elem_dtype, str rounding,"
    " ScalarType out_dtype, Tensor? qdata=None, Tensor? scale=None) -> Tensor",
    _quantize_mm,
    _spec_quantize_mm,
)
grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", grouped_product, _spec_grouped_mm
)
flatten = define("flatten(Tensor x) -> Tensor", _flatten, _spec_flatten)
