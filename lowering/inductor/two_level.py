"""Two-level scales in Inductor's operators: E4M3 for a tile, and FP32 for the tensor or for each row.

    scales              the E4M3 scale of every tile; with a choice, the candidate with the smaller error
    encoding_factors    1/(scale · 1/G)
    decoding_factors    the scale in FP32

`formats.two_level` has the definition. An error is a sum in a fixed order, so its loops are unrolled.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops as inductor

from mxcompile.formats import E4M3, Copy, Format
from mxcompile.formats.four_over_six import BlockError
from mxcompile.formats.two_level import FP32_MAX, WIDER
from mxcompile.lowering.inductor import elements
from mxcompile.lowering.inductor.blocks import Index, Load, ScaleBlocks, as_float, elementwise
from mxcompile.lowering.inductor.elements import f32, quotient
from mxcompile.lowering.targets import of_device


def outer_loader(outer: ir.TensorBox) -> Load:
    """Returns a loader of the FP32 scale of a tile. outer: a scale of the tensor, [1], or of each row."""
    load, sizes = outer.make_loader(), outer.get_size()

    def loaded(tile: Index) -> Any:
        if len(sizes) < len(tile):
            return load([sympy.S.Zero])
        return load([sympy.S.Zero if size == 1 else index for index, size in zip(tile, sizes, strict=True)])

    return loaded


def _gain(amax: ir.TensorBox | None, form: Format) -> Load:
    """Returns a function that computes G of a tile from the amax of the tensor or of its rows."""
    assert amax is not None, "a cast to two levels reads the amax of its tensor"
    load = outer_loader(amax)

    def gain(tile: Index) -> Any:
        largest = load(tile)
        value = inductor.minimum(quotient(f32(form.largest), largest), f32(FP32_MAX))
        value = inductor.where(inductor.eq(largest, f32(0.0)), f32(1.0), value)
        return inductor.where(inductor.lt(largest, f32(float("inf"))), value, f32(float("nan")))

    return gain


def scales(
    blocks: ScaleBlocks, x: ir.TensorBox, copy: Copy, tile_amax: Load, amax: ir.TensorBox | None
) -> ir.TensorBox:
    """Returns the E4M3 scale of every tile of `x`. tile_amax: loader of its amax. amax: see `_gain`."""
    form, target = copy.format, of_device(blocks.device)
    gain = _gain(amax, form)

    def plain(tile: Index) -> Any:
        return _e4m3(inductor.mul(tile_amax(tile), inductor.mul(gain(tile), f32(1 / form.elem.max))), target)

    scale = plain if form.four_over_six is None else _Choice(blocks, x, copy, tile_amax, amax).scale()
    result = blocks.per_block(
        elements.stored_dtype(E4M3, target), lambda tile: elements.store(scale(tile), E4M3, target)
    )
    result.realize()
    return elements.as_fp8(result, E4M3, target)


def _e4m3(value: Any, target: Any) -> Any:
    """Returns `value`, saturated and rounded to E4M3, in FP32."""
    return elements.rounded(elements.clamped(value, E4M3.max), E4M3, target)


class _Choice:
    """The choice between two scales of every tile of `x`. Arguments: see `scales`."""

    def __init__(
        self, blocks: ScaleBlocks, x: ir.TensorBox, copy: Copy, tile_amax: Load, amax: ir.TensorBox | None
    ) -> None:
        assert amax is not None, "a cast to two levels reads the amax of its tensor"
        self._blocks, self._form, self._tile_amax = blocks, copy.format, tile_amax
        self._target = of_device(blocks.device)
        self._load, self._outer, self._gain = as_float(x), outer_loader(amax), _gain(amax, copy.format)
        rank = len(blocks.shape)
        self._along = copy.dim % rank
        self._across = next((dim for dim in blocks.dims if dim != self._along), self._along)

    def scale(self) -> Load:
        """Returns a loader of the candidate with the smaller error."""
        six, four = (self._candidate(wider) for wider in (1.0, WIDER))
        errors = [self._errors(load) for load in (six, four)]

        def scale(tile: Index) -> Any:
            of_six, of_four = (self._total(error, tile) for error in errors)
            return inductor.where(inductor.lt(of_four, of_six), four(tile), six(tile))

        return scale

    def _candidate(self, wider: float) -> Load:
        """Returns a loader of the scale of every tile, in FP32."""

        def scale(tile: Index) -> Any:
            over = quotient(self._tile_amax(tile), f32(self._form.elem.max))
            return _e4m3(inductor.mul(inductor.mul(over, self._gain(tile)), f32(wider)), self._target)

        result = self._blocks.per_block(torch.float32, scale)
        result.realize()
        return result.make_loader()

    def _errors(self, scale: Load) -> ir.TensorBox:
        """Returns the error of every row of every tile under `scale`; rows are the last dimension."""

        def error(index: Index) -> Any:
            *tile, row = index
            factor = encoding_factor(scale(tile), self._gain(tile))
            total = f32(0.0)
            for offset in range(self._form.tile.along):
                total = inductor.add(total, self._error(tile, row, offset, scale(tile), factor))
            return total

        ranges = [*self._blocks.scale_shape, sympy.Integer(self._form.tile.across)]
        result = elementwise(self._blocks.device, torch.float32, error, ranges)
        result.realize()
        return result

    def _error(self, tile: Index, row: Any, offset: int, scale: Any, factor: Any) -> Any:
        """Returns the error of one element of `tile`."""
        form, index = self._form, list(tile)
        index[self._along] = tile[self._along] * form.tile.along + offset
        if self._across != self._along:
            index[self._across] = tile[self._across] * form.tile.across + row
        value = self._blocks.guarded(index, lambda: self._load(index))
        element = elements.clamped(inductor.mul(value, factor), form.elem.max)
        element = elements.rounded(element, form.elem, self._target)
        decoded = inductor.mul(inductor.mul(element, scale), self._outer(tile))
        difference = inductor.sub(quotient(decoded, f32(form.largest)), value)
        if form.four_over_six is not None and form.four_over_six.error is BlockError.MSE:
            # the maximum changes nothing, and keeps a compiler from contracting square and sum
            return inductor.maximum(inductor.mul(difference, difference), f32(0.0))
        return inductor.abs(difference)

    def _total(self, errors: ir.TensorBox, tile: Index) -> Any:
        """Returns the error of `tile`: its rows' errors, added half to half until one number is left."""
        load = errors.make_loader()
        rows = [load([*tile, sympy.Integer(row)]) for row in range(self._form.tile.across)]
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [inductor.add(rows[row], rows[row + half]) for row in range(half)]
        return rows[0]


def encoding_factor(scale: Any, gain: Any) -> Any:
    """Returns 1/(scale · 1/G), by which a cast multiplies the elements of a tile."""
    over = inductor.mul(scale, quotient(f32(1.0), gain))
    return inductor.minimum(quotient(f32(1.0), over), f32(FP32_MAX))


def encoding_factors(
    blocks: ScaleBlocks, scale: ir.TensorBox, amax: ir.TensorBox | None, form: Format
) -> ir.TensorBox:
    """Returns the FP32 factors by which a cast multiplies the elements of every tile. amax: see `_gain`."""
    load, gain = _loader(blocks, scale), _gain(amax, form)
    return blocks.per_block(torch.float32, lambda tile: encoding_factor(load(tile), gain(tile)))


def decoding_factors(blocks: ScaleBlocks, scale: ir.TensorBox) -> ir.TensorBox:
    """Returns the scales of every tile in FP32."""
    return blocks.per_block(torch.float32, _loader(blocks, scale))


def _loader(blocks: ScaleBlocks, scale: ir.TensorBox) -> Load:
    """Returns a loader of the E4M3 scales `scale`, which are bytes if elements are packed."""
    if scale.get_dtype() is torch.uint8:
        scale = elements.as_dtype(scale, E4M3.dtype)
    return elements.loader(scale, E4M3, of_device(blocks.device))
