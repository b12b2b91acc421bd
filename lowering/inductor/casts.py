"""Inductor lowering of the casts: pointwise and reduction IR that fuses with whatever is around it.

    amax  = max |x| over each block
    byte  = exponent arithmetic on the FP32 bits of amax                     (numerics.scale_bytes)
    y     = x · 2^(127 − byte)
    q     = round(y) to the element type            value = round(y) · 2^(byte − 127)

This serves every device Inductor generates code for; `elements` has how y is rounded and stored there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats import BLOCK, SCALE_NAN, ElemType, Rounding, ScaleLayout, elem_type
from mxcompile.lowering.cpu import casts as cpp
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.elements import f32, i32
from mxcompile.lowering.inductor.tiling import less, place_of, tiled
from mxcompile.lowering.targets import of_device

Index = Sequence[Any]
Load = Callable[[Index], Any]

_F32, _I32 = torch.float32, torch.int32
_VIEW = lowerings[torch.ops.aten.view.default]
_SLICE = lowerings[torch.ops.aten.slice.Tensor]
_CLONE = lowerings[torch.ops.aten.clone.default]


class _Blocks:
    """How a tensor is cut: `dims` are the dimensions blocks of 32 run along."""

    def __init__(self, x: ir.TensorBox, dims: Sequence[int]) -> None:
        self.shape = list(x.get_size())
        self.device = x.get_device_or_error()
        self.dims = sorted(dim % len(self.shape) for dim in dims)
        self.scale_shape = [
            FloorDiv(size + (BLOCK - 1), BLOCK) if dim in self.dims else size
            for dim, size in enumerate(self.shape)
        ]
        known = V.graph.sizevars.statically_known_multiple_of
        self.ragged = [dim for dim in self.dims if not known(self.shape[dim], BLOCK)]

    def guarded(self, index: Index, body: Callable[[], Any]) -> Any:
        """`body()` where `index` lies inside the tensor, 0 past the end of a short last block."""
        mask = None
        for dim in self.ragged:
            inside = less(index[dim], self.shape[dim])
            mask = inside if mask is None else inductor.logical_and(mask, inside)
        return body() if mask is None else inductor.masked(mask, body, 0.0)

    def pointwise(self, dtype: torch.dtype, body: Callable[[Index, Index], Any]) -> ir.TensorBox:
        """A tensor of the cut shape; `body` takes an element's index and its block's.

        Iterates block by block, so that a block's scale is loaded once, also over the missing elements of
        a short last block, which are cropped. (Deriving the block by an integer division of the element's
        index instead runs into Inductor's C++ loop splitting, which drops the remainder.)
        """
        return self._by_block(dtype, self.dims, body)

    def repeated(self, dtype: torch.dtype, dim: int, body: Load) -> ir.TensorBox:
        """A tensor with one value a block along the other dimension, repeated along `dim`."""
        return self._by_block(dtype, [dim], lambda _, block: body(block))

    def _by_block(
        self, dtype: torch.dtype, dims: list[int], body: Callable[[Index, Index], Any]
    ) -> ir.TensorBox:
        split: list[Any] = []
        places: list[int] = []
        for dim, size in enumerate(self.scale_shape):
            places.append(len(split))
            split += [size, sympy.Integer(BLOCK)] if dim in dims else [size]

        def inner(index: Index) -> Any:
            block = [index[place] for place in places]
            return body(_element(block, dims, [index[places[dim] + 1] for dim in dims]), block)

        padded = [size * BLOCK if dim in dims else size for dim, size in enumerate(self.scale_shape)]
        result = self._create(dtype, split, inner)
        ragged = [dim for dim in dims if dim in self.ragged]
        if ragged:
            result.realize()
        result = _VIEW(result, padded)
        for dim in ragged:
            result = _SLICE(result, dim, 0, self.shape[dim])
        whole: ir.TensorBox = _CLONE(result) if any(dim > 0 for dim in ragged) else result
        return whole

    def per_block(self, dtype: torch.dtype, body: Load) -> ir.TensorBox:
        """A tensor with one value a block."""
        return self._create(dtype, self.scale_shape, body)

    def _create(self, dtype: torch.dtype, ranges: list[Any], inner: Load) -> ir.TensorBox:
        return ir.Pointwise.create(device=self.device, dtype=dtype, inner_fn=inner, ranges=ranges)

    def amax(self, load: Load) -> ir.TensorBox:
        """Block maxima of |x| in FP32, NaN if the block holds one."""

        def inner(block: Index, offsets: Index) -> Any:
            index = _element(block, self.dims, offsets)
            return inductor.abs(self.guarded(index, lambda: load(index)))

        return ir.Reduction.create(
            device=self.device,
            dst_dtype=_F32,
            src_dtype=_F32,
            inner_fn=inner,
            ranges=self.scale_shape,
            reduction_ranges=[sympy.Integer(BLOCK)] * len(self.dims),
            reduction_type="max",
        )


def _element(block: Index, dims: Sequence[int], offsets: Index) -> list[Any]:
    """Index of the element at `offsets`, along `dims`, inside the block at `block`."""
    index = list(block)
    for dim, offset in zip(dims, offsets, strict=True):
        index[dim] = index[dim] * BLOCK + offset
    return index


class _Cast:
    """The scales of one tensor, and its elements over them."""

    def __init__(self, x: ir.TensorBox, dims: Sequence[int], elem: ElemType, mode: Rounding) -> None:
        x.realize()
        self.blocks = _Blocks(x, dims)
        self.elem = elem
        self.mode = mode
        self._load = _as_float(x)
        amax = self.blocks.amax(self._load)
        amax.realize()
        amax_of = amax.make_loader()
        self.byte: Load = lambda block: _scale_byte(amax_of(block), elem, mode)
        self.target = of_device(x.get_device_or_error())

    def rounded(self, index: Index, inverse: Any) -> Any:
        """Element at `index` over its scale, rounded to the element type, in FP32."""
        value = self.blocks.guarded(index, lambda: self._load(index))
        y = inductor.mul(value, inverse)
        if self.mode in (Rounding.FLOOR, Rounding.EVEN):  # the others keep |y| ≤ max by themselves
            y = inductor.minimum(inductor.maximum(y, f32(-self.elem.max)), f32(self.elem.max))
        return elements.rounded(y, self.elem, self.target)

    def scales(self, body: Callable[[Any], Any]) -> Load:
        """`body` of each block's byte, computed once per block."""
        values = self.blocks.per_block(_F32, lambda block: body(self.byte(block)))
        if self.blocks.device.type == "cpu" and len(self.blocks.shape) - 1 not in self.blocks.dims:
            values.realize()  # neighbours have different scales: read them, do not recompute them
        return values.make_loader()


def _as_float(x: ir.TensorBox) -> Load:
    """Loads `x` as FP32, rounded to its own dtype even where it is still in a register."""
    load, dtype = x.make_loader(), x.get_dtype()

    def loaded(index: Index) -> Any:
        value = load(index)
        if dtype is not _F32:
            value = inductor.to_dtype(value, dtype, use_compute_types=False)
        return inductor.to_dtype(value, _F32)

    return loaded


def _scale_byte(amax: Any, elem: ElemType, mode: Rounding) -> Any:
    """`numerics.scale_bytes` in Inductor's operators."""
    bits = inductor.bitwise_and(inductor.to_dtype_bitcast(amax, _I32, _F32), i32(0x7FFFFFFF))
    added = {Rounding.RCEIL: 0x1FFFFF, Rounding.EVEN: 1 << (22 - elem.mantissa_bits)}.get(mode, 0)
    exponent = inductor.bitwise_right_shift(inductor.add(bits, i32(added)), i32(23))
    byte = inductor.sub(exponent, i32(elem.emax))
    byte = inductor.minimum(inductor.maximum(byte, i32(0)), i32(254))
    if mode is Rounding.CEIL:
        mantissa = inductor.bitwise_and(bits, i32(0x7FFFFF))
        byte = inductor.add(byte, inductor.where(inductor.gt(mantissa, i32(0)), i32(1), i32(0)))
    return inductor.where(inductor.ge(bits, i32(0x7F800000)), i32(SCALE_NAN), byte)


def _power(byte: Any, bits: Any, edge: int) -> Any:
    """FP32 with exponent `bits`; 2^−127 where the byte is `edge`, NaN where it says NaN."""
    bits = inductor.bitwise_left_shift(bits, i32(23))
    bits = inductor.where(inductor.eq(byte, i32(edge)), i32(0x00400000), bits)
    bits = inductor.where(inductor.eq(byte, i32(SCALE_NAN)), i32(0x7FC00000), bits)
    return inductor.to_dtype_bitcast(bits, _F32, _I32)


def _scale_value(byte: Any) -> Any:
    return _power(byte, byte, 0)


def _inverse_scale_value(byte: Any) -> Any:
    return _power(byte, inductor.sub(i32(254), byte), 254)


def _dims(x: ir.TensorBox, block_dim: int, square: bool) -> tuple[int, ...]:
    return (-2, -1) if square else (block_dim % len(x.get_size()),)


def _scale_output(cast: _Cast, block_dim: int) -> ir.TensorBox:
    """Scale bytes in the layout of blocks along `block_dim`, those of a square tile repeated."""
    blocks = cast.blocks

    def byte(block: Index) -> Any:
        return inductor.to_dtype(cast.byte(block), torch.uint8)

    dim = block_dim % len(blocks.shape)
    if blocks.dims == [dim]:
        return blocks.per_block(torch.uint8, byte)
    (other,) = (d for d in blocks.dims if d != dim)
    return blocks.repeated(torch.uint8, other, byte)


@register_lowering(ops.quantize, type_promotion_kind=None)
def lower_quantize(
    x: ir.TensorBox,
    block_dim: int,
    elem_dtype: torch.dtype,
    rounding: str,
    square: bool = False,
    scale_layout: str = ScaleLayout.ROW_MAJOR,
) -> tuple[ir.TensorBox, ir.TensorBox]:
    """Qdata and scale bytes."""
    if (made := cpp.quantize(x, block_dim, elem_dtype, rounding, square, scale_layout)) is not None:
        return made
    cast = _Cast(x, _dims(x, block_dim, square), elem_type(elem_dtype), Rounding(rounding))
    inverse = cast.scales(_inverse_scale_value)
    stored = cast.blocks.pointwise(
        elements.stored_dtype(cast.elem, cast.target),
        lambda index, block: elements.store(cast.rounded(index, inverse(block)), cast.elem, cast.target),
    )
    qdata = elements.as_fp8(stored, cast.elem, cast.target)
    scale = _scale_output(cast, block_dim)
    return qdata, scale if scale_layout == ScaleLayout.ROW_MAJOR else tiled(scale, block_dim)


@register_lowering(ops.quantize_dequantize, type_promotion_kind=None)
def lower_quantize_dequantize(
    x: ir.TensorBox,
    block_dim: int,
    elem_dtype: torch.dtype,
    rounding: str,
    square: bool,
    dtype: torch.dtype,
) -> ir.TensorBox:
    """What the quantized tensor stands for, in `dtype`."""
    if (made := cpp.quantize_dequantize(x, block_dim, elem_dtype, rounding, square, dtype)) is not None:
        return made
    cast = _Cast(x, _dims(x, block_dim, square), elem_type(elem_dtype), Rounding(rounding))
    inverse, scale = cast.scales(_inverse_scale_value), cast.scales(_scale_value)
    return cast.blocks.pointwise(
        dtype,
        lambda index, block: inductor.to_dtype(
            inductor.mul(cast.rounded(index, inverse(block)), scale(block)), dtype
        ),
    )


@register_lowering(ops.dequantize, type_promotion_kind=None)
def lower_dequantize(
    qdata: ir.TensorBox, scale: ir.TensorBox, block_dim: int, dtype: torch.dtype
) -> ir.TensorBox:
    """Elements times scales, in `dtype`."""
    if (made := cpp.dequantize(qdata, scale, block_dim, dtype)) is not None:
        return made
    blocks = _Blocks(qdata, (block_dim,))
    byte_of = scale.make_loader()
    if len(blocks.shape) == 2 and len(scale.get_size()) == 1:
        load_tiled, rowwise = byte_of, block_dim % 2 == 1
        width = blocks.scale_shape[block_dim]

        def byte_of(index: Index) -> Any:
            row, block = index if rowwise else reversed(index)
            return load_tiled([place_of(row, block, width)])

    values = blocks.per_block(_F32, lambda block: _scale_value(inductor.to_dtype(byte_of(block), _I32)))
    if blocks.device.type == "cpu" and len(blocks.shape) - 1 not in blocks.dims:
        values.realize()
    value_of = values.make_loader()
    element = elements.loader(qdata, elem_type(qdata.get_dtype()), of_device(blocks.device))
    return blocks.pointwise(
        dtype,
        lambda index, block: inductor.to_dtype(
            inductor.mul(blocks.guarded(index, lambda: element(index)), value_of(block)), dtype
        ),
    )


@register_lowering(ops.quantize_both, type_promotion_kind=None)
def lower_quantize_both(
    x: ir.TensorBox, elem_dtype: torch.dtype, rounding: str, scale_layout: str = ScaleLayout.ROW_MAJOR
) -> tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox, ir.TensorBox]:
    """Both layouts; the scheduler fuses their reads where it can."""
    rowwise = lower_quantize(x, -1, elem_dtype, rounding, False, scale_layout)
    columnwise = lower_quantize(x, -2, elem_dtype, rounding, False, scale_layout)
    return *rowwise, *columnwise


@register_lowering(ops.flatten, type_promotion_kind=None)
def lower_flatten(x: ir.TensorBox) -> ir.TensorBox:
    """A view: the elements are where they were. Of stored elements, or Inductor compares sizes to find it."""
    x.realize()
    whole: ir.TensorBox = _VIEW(x, [sympy.prod(x.get_size())])
    return whole
