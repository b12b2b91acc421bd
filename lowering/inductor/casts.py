"""Inductor lowering of MXFP8 casts: pointwise and reduction IR, which fuses with its neighbours.

    amax  = max |x| over each block
    byte  = exponent arithmetic on the FP32 bits of amax                     (numerics.scale_bytes)
    y     = x · 2^(127 − byte)
    q     = round(y) to the element type            value = round(y) · 2^(byte − 127)

The loops run on every device that Inductor generates code for. `elements` rounds y and stores q.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import ops as inductor

from mxcompile import ops
from mxcompile.formats import SCALE_NAN, Copy, ElemType, Rounding, Tile, elem_type
from mxcompile.formats.numerics import SMALLEST_NORMAL, added_to_amax
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.blocks import Index, Load, ScaleBlocks, as_float
from mxcompile.lowering.inductor.elements import i32
from mxcompile.lowering.inductor.tiling import offset_of, tiled
from mxcompile.lowering.targets import of_device

_F32, _I32 = torch.float32, torch.int32
_VIEW = lowerings[torch.ops.aten.view.default]


class _TensorCast:
    """The MXFP8 scales of one tensor, and its elements divided by these scales."""

    def __init__(self, x: ir.TensorBox, copy: Copy) -> None:
        x.realize()  # amax and elements both read it: without a buffer each would compute its producer
        self.blocks = ScaleBlocks(x, copy.dim, copy.format.tile)
        self.elem = copy.elem
        self.mode = copy.rounding
        self._load = as_float(x)
        amax = self.blocks.amax(self._load)
        amax.realize()
        amax_of = amax.make_loader()
        self.byte: Load = lambda block: scale_byte(amax_of(block), self.elem, self.mode)
        self.target = of_device(x.get_device_or_error())

    def rounded(self, index: Index, inverse: Any) -> Any:
        """Returns the element at `index` times `inverse`, rounded to the element type, in FP32."""
        value = self.blocks.guarded(index, lambda: self._load(index))
        y = inductor.mul(value, inverse)
        if self.mode in (Rounding.FLOOR, Rounding.EVEN):  # with other roundings |y| ≤ max holds anyway
            y = elements.clamped(y, self.elem.max)
        return elements.rounded(y, self.elem, self.target)

    def scales(self, body: Callable[[Any], Any]) -> Load:
        """Returns a loader of `body(byte)` for each block, computed once per block."""
        values = self.blocks.per_block(_F32, lambda block: body(self.byte(block)))
        if self.blocks.across_rows:
            values.realize()
        return values.make_loader()


def scale_byte(amax: Any, elem: ElemType, mode: Rounding) -> Any:
    """Returns the scale byte of `amax`: `numerics.scale_bytes` in Inductor's operators."""
    bits = inductor.bitwise_and(inductor.to_dtype_bitcast(amax, _I32, _F32), i32(0x7FFFFFFF))
    mantissa = bits
    if elem.emax == 0:
        small = inductor.sub(inductor.add(bits, bits), i32(SMALLEST_NORMAL))
        mantissa = inductor.where(inductor.lt(bits, i32(SMALLEST_NORMAL)), small, bits)
    exponent = inductor.bitwise_right_shift(inductor.add(mantissa, i32(added_to_amax(elem, mode))), i32(23))
    byte = inductor.sub(exponent, i32(elem.emax))
    byte = inductor.minimum(inductor.maximum(byte, i32(0)), i32(254))
    return inductor.where(inductor.ge(bits, i32(0x7F800000)), i32(SCALE_NAN), byte)


def _power(byte: Any, bits: Any, edge: int) -> Any:
    """Returns the FP32 power of two with exponent field `bits`; 2^−127 for byte `edge`, NaN for 255."""
    bits = inductor.bitwise_left_shift(bits, i32(23))
    bits = inductor.where(inductor.eq(byte, i32(edge)), i32(0x00400000), bits)  # 2^−127 is subnormal
    bits = inductor.where(inductor.eq(byte, i32(SCALE_NAN)), i32(0x7FC00000), bits)  # the canonical NaN
    return inductor.to_dtype_bitcast(bits, _F32, _I32)


def scale_value(byte: Any) -> Any:
    """Returns 2^(byte − 127) in FP32, NaN for 255."""
    return _power(byte, byte, 0)


def inverse_scale_value(byte: Any) -> Any:
    """Returns 2^(127 − byte) in FP32, NaN for 255."""
    return _power(byte, inductor.sub(i32(254), byte), 254)


def _scale_output(cast: _TensorCast, block_dim: int) -> ir.TensorBox:
    """Returns scale bytes of blocks along `block_dim`; the byte of a square tile is repeated per row."""
    blocks = cast.blocks

    def byte(block: Index) -> Any:
        return inductor.to_dtype(cast.byte(block), torch.uint8)

    dim = block_dim % len(blocks.shape)
    if blocks.dims == [dim]:
        return blocks.per_block(torch.uint8, byte)
    (other,) = (d for d in blocks.dims if d != dim)
    return blocks.repeated(torch.uint8, other, byte)


def lower(x: ir.TensorBox, copy: Copy) -> list[ir.TensorBox]:
    """Returns the tensors of an MXFP8 copy of `x`: qdata and scale bytes, or values."""
    cast = _TensorCast(x, copy)
    inverse = cast.scales(inverse_scale_value)
    if copy.dtype is not None:
        dtype, scale = copy.dtype, cast.scales(scale_value)
        values = cast.blocks.pointwise(
            dtype,
            lambda index, block: inductor.to_dtype(
                inductor.mul(cast.rounded(index, inverse(block)), scale(block)), dtype
            ),
        )
        return [values]
    stored = cast.blocks.pointwise(
        elements.stored_dtype(cast.elem, cast.target),
        lambda index, block: elements.store(cast.rounded(index, inverse(block)), cast.elem, cast.target),
    )
    qdata = elements.as_fp8(stored, cast.elem, cast.target)
    bytes_ = _scale_output(cast, copy.dim)
    return [qdata, tiled(bytes_, copy.dim) if copy.is_tiled else bytes_]


def decoded(qdata: ir.TensorBox, scale: ir.TensorBox, block_dim: int, dtype: torch.dtype) -> ir.TensorBox:
    """Returns the values of MXFP8 data in `dtype`. scale: a byte per block of 32, row-major or tiled."""
    blocks = ScaleBlocks(qdata, block_dim, Tile.ROW)
    byte_of = scale.make_loader()
    if len(blocks.shape) == 2 and len(scale.get_size()) == 1:
        load_tiled, rowwise = byte_of, block_dim % 2 == 1
        width = blocks.scale_shape[block_dim]

        def byte_of(index: Index) -> Any:
            row, block = index if rowwise else reversed(index)
            return load_tiled([offset_of(row, block, width)])

    values = blocks.per_block(_F32, lambda block: scale_value(inductor.to_dtype(byte_of(block), _I32)))
    if blocks.across_rows:
        values.realize()
    value_of = values.make_loader()
    element = elements.loader(qdata, elem_type(qdata.get_dtype()), of_device(blocks.device))
    return blocks.pointwise(
        dtype,
        lambda index, block: inductor.to_dtype(
            inductor.mul(blocks.guarded(index, lambda: element(index)), value_of(block)), dtype
        ),
    )


@register_lowering(ops.flatten, type_promotion_kind=None)
def lower_flatten(x: ir.TensorBox) -> ir.TensorBox:
    """Lowers ``mx.flatten``: stores `x` and returns a view. For other views Inductor would compare sizes."""
    x.realize()
    whole: ir.TensorBox = _VIEW(x, [sympy.prod(x.get_size())])
    return whole
