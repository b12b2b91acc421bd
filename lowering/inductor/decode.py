"""Inductor lowering of ``mx.decode``, and of ``mx.weight_only_mm`` where it dequantizes the weight.

element · factor                       (`scales.decoding_factors`)
x · wᵀ  →  mm(x, decode(w)ᵀ)           the library's product: BF16 if x and the result are BF16, else FP32
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import add, cat, lowerings, permute, register_lowering, to_dtype, view
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as inductor

from mxcompile import ops
from mxcompile.formats import FNUZ, ElemType, Format, Tile, elem_type
from mxcompile.lowering.cpu import casts, weight_only
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.blocks import Index, ScaleBlocks, elementwise
from mxcompile.lowering.inductor.scales import decoding_factors, fp32_scale_of
from mxcompile.lowering.inductor.two_level import outer_loader
from mxcompile.lowering.targets import of_device

_I32 = torch.int32
_MM = lowerings[torch.ops.aten.mm.default]


@register_lowering(ops.decode, type_promotion_kind=None)
def lower_decode(
    qdata: ir.TensorBox,
    scale: ir.TensorBox | None,
    block_dim: int,
    fmt: str,
    dtype: torch.dtype,
    amax: ir.TensorBox | None = None,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Lowers ``mx.decode``: elements times scales; without `scale`, the elements.

    dtype: also a FNUZ type, or uint8 for the codes of packed data.
    amax: amax of the tensor, for its FP32 scale. global_scale: divisor of a stored weight's values.
    """
    form = Format.parse(fmt)
    if dtype in FNUZ.values():
        return _as_fnuz(qdata)
    if scale is not None and amax is None:
        values = casts.decoded(qdata, scale, block_dim, form, dtype, global_scale)
        if values is not None:
            return values
    if form.packed:
        qdata = _unpacked(qdata, block_dim, form.elem)
        if dtype is torch.uint8:
            return qdata
        form = replace(form, tile=Tile(1, form.tile.along))  # a square tile has a scale for each row
    blocks = ScaleBlocks(qdata, block_dim, form.tile)
    element = elements.loader(qdata, form.elem, of_device(blocks.device))
    factor = None if scale is None else decoding_factors(blocks, scale, form)
    outer = None if amax is None else outer_loader(amax)
    divisor = None if global_scale is None else outer_loader(global_scale)

    def value(index: Index, block: Index) -> Any:
        result = blocks.guarded(index, lambda: element(index))
        if factor is not None:
            times = factor(block)
            if outer is not None:
                times = inductor.mul(times, fp32_scale_of(outer(block), form))
            if divisor is not None:
                times = elements.quotient(times, divisor(block))
            result = inductor.mul(result, times)
        return inductor.to_dtype(result, dtype)

    return blocks.pointwise(dtype, value)


def _unpacked(packed: ir.TensorBox, dim: int, elem: ElemType) -> ir.TensorBox:
    """Returns the codes of `packed`, one code per byte, along dimension `dim`."""
    load = packed.make_loader()
    shape = list(packed.get_size())
    at = dim % len(shape)

    def code(index: Index) -> Any:
        byte = inductor.to_dtype(load([*index[: at + 1], *index[at + 2 :]]), _I32)
        shift = inductor.index_expr(index[at + 1] * elem.bits, _I32)
        shifted = inductor.bitwise_right_shift(byte, shift)
        return inductor.to_dtype(
            inductor.bitwise_and(shifted, elements.i32((1 << elem.bits) - 1)), torch.uint8
        )

    ranges = [*shape[: at + 1], sympy.Integer(elem.per_byte), *shape[at + 1 :]]
    codes = elementwise(packed.get_device_or_error(), torch.uint8, code, ranges)
    if packed.get_device_or_error().type == "cpu":  # C++ loops must not divide an index (see `ScaleBlocks`)
        codes.realize()
    result: ir.TensorBox = view(codes, [*shape[:at], shape[at] * elem.per_byte, *shape[at + 1 :]])
    return result


def _as_fnuz(qdata: ir.TensorBox) -> ir.TensorBox:
    """Returns OCP elements as FNUZ elements of half the value."""
    elem = elem_type(qdata.get_dtype())
    load = qdata.make_loader()

    def code(index: Index) -> Any:
        stored = load(index)
        bits = inductor.to_dtype(inductor.to_dtype_bitcast(stored, torch.uint8, elem.dtype), _I32)
        return elements.fnuz_code(inductor.to_dtype(stored, torch.float32), bits, elem)

    codes = elementwise(qdata.get_device_or_error(), torch.uint8, code, list(qdata.get_size()))
    codes.realize()
    codes.freeze_layout()  # contiguous like its fake tensor; else Inductor may take the layout of its input
    return elements.as_dtype(codes, FNUZ[elem.dtype])


def lower_weight_only_mm(
    x: ir.TensorBox,
    qdata: ir.TensorBox,
    scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Lowers x [M, K] · wᵀ [N, K] (+ bias) on every device: dequantizes the weight."""
    narrow = x.get_dtype() is torch.bfloat16 and out_dtype is torch.bfloat16
    dtype = torch.bfloat16 if narrow else torch.float32
    weights = weight_only.parts(qdata, scale, dtype, Format.parse(fmt), global_scale) or [
        lower_decode(qdata, scale, -1, fmt, dtype, None, global_scale)
    ]
    x = to_dtype(x, dtype)
    outs = [_MM(x, permute(weight, [1, 0])) for weight in weights]
    out: Any = outs[0]
    if len(outs) > 1:  # before PyTorch 2.13 Inductor's cat requires that the current node is a cat
        with V.graph.set_current_node(fx.Graph().call_function(torch.ops.aten.cat.default, ([],))):
            out = cat(outs, 1)
    result: ir.TensorBox = to_dtype(out if bias is None else add(out, bias), out_dtype)
    return result
