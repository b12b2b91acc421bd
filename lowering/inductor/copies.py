"""Inductor lowering of ``mx.cast``: by a template that makes all its copies, else copy by copy.

MXFP8, MXINT8   a kernel of `cpu.casts`, or loops
other formats   loops

    y        x · 2^(127 − byte), or x / scale; two levels: x · 1/(scale · 1/G)        (`scales`)
    q        round(y) to the element type          value = round(y) · scale           (`elements`)

Loops run on every device that Inductor generates code for, and fuse with their neighbours. FP32 quotients are
rounded to nearest on every chip, so that elements are bit-identical to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import clone, register_lowering
from torch._inductor.virtualized import ops as inductor

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart, ScaleLayout, ScaleType
from mxcompile.lowering import candidates
from mxcompile.lowering.cpu import casts as cpp
from mxcompile.lowering.inductor import elements, stochastic
from mxcompile.lowering.inductor.blocks import Index, ScaleBlocks, as_float
from mxcompile.lowering.inductor.elements import f32
from mxcompile.lowering.inductor.scales import decoding_factors, encoding_factors, lower_largest, scales
from mxcompile.lowering.inductor.tiling import tiled
from mxcompile.lowering.targets import of_device

Results = Sequence[ir.TensorBox]

OptionalTensors = Sequence[ir.TensorBox | None]
"""A tensor for each copy, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CastCall:
    """A call of ``mx.cast``. Fields: see `ops.cast`."""

    x: ir.TensorBox
    copies: Sequence[Copy]
    seed: ir.TensorBox | None
    stream: int
    scales: OptionalTensors
    amaxes: OptionalTensors
    y: ir.TensorBox | None


@register_lowering(ops.cast, type_promotion_kind=None)
def lower_cast(
    x: ir.TensorBox,
    names: Sequence[str],
    seed: ir.TensorBox | None = None,
    stream: int = 0,
    scales: OptionalTensors | None = None,
    amaxes: OptionalTensors | None = None,
    y: ir.TensorBox | None = None,
) -> Results:
    """Lowers ``mx.cast``. Returns the tensors of the copies of `x`, then of `y`."""
    copies, none = [Copy.parse(name) for name in names], [None] * len(names)
    scales, amaxes = scales or none, amaxes or none
    call = CastCall(x=x, copies=copies, seed=seed, stream=stream, scales=scales, amaxes=amaxes, y=y)
    results: Results | None = candidates.first("cast", call)
    if results is not None:
        return results
    if y is not None:
        sources = (lower_cast(source, names, seed, stream, scales, amaxes) for source in (x, y))
        return [tensor for tensors in sources for tensor in tensors]
    lowered = [  # the kernel in C++ computes scales itself
        (cpp.cast(x, copy) if scale is None else None) or _looped(call, position)
        for position, (copy, scale) in enumerate(zip(copies, scales, strict=True))
    ]
    return [tensor for tensors in lowered for tensor in tensors]


def _looped(call: CastCall, position: int) -> Results:
    x, copy, scale, amax = call.x, call.copies[position], call.scales[position], call.amaxes[position]
    supported = Copy(format=copy.format, dim=copy.dim, dtype=copy.dtype, part=copy.part)
    assert copy.is_mx or copy == supported, f"no loops make {copy}"
    if copy.part is CopyPart.LARGEST:
        return [lower_largest(x)]
    if scale is None:
        scale = scales(x, copy, amax)
    elif copy.part is CopyPart.CODES and copy.dtype is None:
        scale = clone(scale)
    if copy.part is CopyPart.SCALES:
        return [scale]
    blocks = ScaleBlocks(x, copy.dim, copy.format.tile)
    element, elem, target = _rounded(call, position, blocks, scale), copy.elem, of_device(blocks.device)
    if copy.dtype is not None:
        dtype = copy.dtype
        factor = decoding_factors(blocks, scale, copy.format) if copy.part is CopyPart.CODES else None

        def value(index: Index, block: Index) -> Any:
            rounded = element(index, block)
            return inductor.to_dtype(inductor.mul(rounded, factor(block)) if factor else rounded, dtype)

        return [blocks.pointwise(dtype, value)]
    stored = blocks.pointwise(
        elements.stored_dtype(elem, target),
        lambda index, block: elements.store(element(index, block), elem, target),
    )
    qdata = elements.as_fp8(stored, elem, target)
    return [qdata] if copy.part is CopyPart.ELEMENTS else [qdata, _laid_out(scale, blocks, copy)]


def _rounded(
    call: CastCall, position: int, blocks: ScaleBlocks, scale: ir.TensorBox
) -> Callable[[Index, Index], Any]:
    """Returns a loader of the rounded element, in FP32, at the indices of the element and of its block."""
    x, copy, seed = call.x, call.copies[position], call.seed
    x.realize()
    form, load, target = copy.format, as_float(x), of_device(blocks.device)
    factor = encoding_factors(blocks, scale, form, call.amaxes[position])
    half = None if seed is None else stochastic.halves(blocks.shape, copy.dim, seed, call.stream)
    scaled = elements.quotient if form.scale is ScaleType.FP32 else inductor.mul

    def rounded(index: Index, block: Index) -> Any:
        value = blocks.guarded(index, lambda: load(index))
        y = elements.clamped(scaled(value, factor(block)), form.elem.max)
        if form.amax.stateful:  # a delayed scale is finite even if x is not
            finite = inductor.lt(inductor.abs(value), f32(float("inf")))
            y = inductor.where(finite, y, f32(float("nan")))
        if form.stochastic:
            assert half is not None, f"a cast to {form} rounds stochastically: pass seed"
            return stochastic.rounded(y, form.elem, half(index))
        return elements.rounded(y, form.elem, target)

    return rounded


def _laid_out(scale: ir.TensorBox, blocks: ScaleBlocks, copy: Copy) -> ir.TensorBox:
    """Returns `scale`, one scale for each tile, in the layout of `copy`."""
    if copy.is_square and copy.layout is not ScaleLayout.ROW_MAJOR:
        (other,) = (dim for dim in blocks.dims if dim != copy.dim % len(blocks.shape))
        byte_of = scale.make_loader()
        scale = blocks.pointwise(torch.uint8, lambda _, block: byte_of(block), [other])  # repeats each
    return tiled(scale, copy.dim) if copy.is_tiled else scale
