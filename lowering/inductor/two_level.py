"""Two-level scales in Inductor's operators: E4M3 for a tile, and an FP32 number for the tensor.

    G        448 · max / amax of the tensor
    scale    E4M3 of amax of the tile · (G · 1/max)
    factor   1/(scale · 1/G) to encode elements; the scale in FP32 to decode them

`formats.encoding` has the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops as inductor

from mxcompile.formats import E4M3, Format
from mxcompile.formats.encoding import FP32_MAX
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.blocks import Index, Load, ScaleBlocks
from mxcompile.lowering.inductor.elements import f32, quotient
from mxcompile.lowering.targets import of_device


def _gain(amax: ir.TensorBox | None, form: Format) -> Callable[[], Any]:
    """Returns a function that computes G from the amax of the tensor."""
    assert amax is not None, "a cast to two levels reads the amax of its tensor"
    load = amax.make_loader()

    def gain() -> Any:
        largest = load([sympy.S.Zero])
        value = inductor.minimum(quotient(f32(form.largest), largest), f32(FP32_MAX))
        value = inductor.where(inductor.eq(largest, f32(0.0)), f32(1.0), value)
        return inductor.where(inductor.lt(largest, f32(float("inf"))), value, f32(float("nan")))

    return gain


def scales(blocks: ScaleBlocks, tile_amax: Load, amax: ir.TensorBox | None, form: Format) -> ir.TensorBox:
    """Returns the E4M3 scale of every block. tile_amax: loads its amax. amax: amax of the tensor, [1]."""
    target, gain = of_device(blocks.device), _gain(amax, form)

    def scale(block: Index) -> Any:
        scaled = inductor.mul(tile_amax(block), inductor.mul(gain(), f32(1 / form.elem.max)))
        scaled = elements.rounded(elements.clamped(scaled, E4M3.max), E4M3, target)
        return elements.store(scaled, E4M3, target)

    result = blocks.per_block(elements.stored_dtype(E4M3, target), scale)
    result.realize()
    return elements.as_fp8(result, E4M3, target)


def factors(
    blocks: ScaleBlocks, scale: ir.TensorBox, amax: ir.TensorBox | None, form: Format
) -> ir.TensorBox:
    """Returns the FP32 factors of every block's elements.

    amax: amax of the tensor if the factors encode elements, None if they decode them.
    """
    load = elements.loader(scale, E4M3, of_device(blocks.device))
    if amax is None:
        return blocks.per_block(torch.float32, load)
    gain = _gain(amax, form)

    def factor(block: Index) -> Any:
        of_block = inductor.mul(load(block), quotient(f32(1.0), gain()))
        return inductor.minimum(quotient(f32(1.0), of_block), f32(FP32_MAX))

    return blocks.per_block(torch.float32, factor)
