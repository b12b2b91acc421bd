"""Inductor IR over a tensor that is cut into blocks with one scale each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import clone, slice_, view
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile.formats import WHOLE, Tile, encoding
from mxcompile.lowering.inductor.elements import f32
from mxcompile.lowering.inductor.tiling import less

Index = Sequence[Any]
Load = Callable[[Index], Any]

_F32 = torch.float32


def as_float(x: ir.TensorBox) -> Load:
    """Returns a loader of FP32 values of `x`, rounded to its dtype: a fused producer may pass FP32 values."""
    load, dtype = x.make_loader(), x.get_dtype()

    def loaded(index: Index) -> Any:
        value = load(index)
        if dtype is not _F32:
            value = inductor.to_dtype(value, dtype, use_compute_types=False)
        return inductor.to_dtype(value, _F32)

    return loaded


def elementwise(device: torch.device, dtype: torch.dtype, body: Load, ranges: list[Any]) -> ir.TensorBox:
    """Returns a tensor of the shape `ranges` with the element ``body(index)`` at each index."""
    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=body, ranges=ranges)


class ScaleBlocks:
    """A tensor cut into blocks of the shape `tile` for a contraction along `block_dim`.

    extents: elements of a block along each dimension; `WHOLE` means all.
    """

    def __init__(self, x: ir.TensorBox, block_dim: int, tile: Tile) -> None:
        self.shape = list(x.get_size())
        self.device = x.get_device_or_error()
        self.extents = extents = encoding.extents(len(self.shape), block_dim, tile)
        self.dims = [dim for dim, extent in enumerate(extents) if extent not in (1, WHOLE)]
        self.wholes = [dim for dim, extent in enumerate(extents) if extent == WHOLE]
        self.scale_shape = [
            sympy.S.One if extent == WHOLE else FloorDiv(size + (extent - 1), extent)
            for size, extent in zip(self.shape, extents, strict=True)
        ]
        is_multiple = V.graph.sizevars.statically_known_multiple_of
        self.ragged = [dim for dim in self.dims if not is_multiple(self.shape[dim], extents[dim])]

    def guarded(self, index: Index, body: Callable[[], Any]) -> Any:
        """Returns `body()`, or 0 if `index` is past the end of a short last block."""
        mask = None
        for dim in self.ragged:
            inside = less(index[dim], self.shape[dim])
            mask = inside if mask is None else inductor.logical_and(mask, inside)
        return body() if mask is None else inductor.masked(mask, body, 0.0)

    def pointwise(
        self, dtype: torch.dtype, body: Callable[[Index, Index], Any], dims: list[int] | None = None
    ) -> ir.TensorBox:
        """Returns a tensor of the shape of x; `body` takes the indices of an element and of its block.

        dims: the dimensions with several elements per index; with fewer than all that the tile has, the other
        dimensions have an element for each block.

        Iterates block by block, so that the scale of a block is loaded once. A short last block is computed
        in full and cropped. An integer division of the element's index would be simpler, but Inductor's C++
        loop splitting drops the remainder.
        """
        dims = self.dims if dims is None else dims
        split: list[Any] = []
        positions: list[int] = []
        sizes = [self.shape[dim] if dim in self.wholes else size for dim, size in enumerate(self.scale_shape)]
        for dim, size in enumerate(sizes):
            positions.append(len(split))
            split += [size, sympy.Integer(self.extents[dim])] if dim in dims else [size]

        def inner(index: Index) -> Any:
            block = [index[position] for position in positions]
            element = self._element(block, dims, [index[positions[dim] + 1] for dim in dims])
            for dim in self.wholes:
                block[dim] = sympy.S.Zero
            return body(element, block)

        padded = [size * self.extents[dim] if dim in dims else size for dim, size in enumerate(sizes)]
        result = elementwise(self.device, dtype, inner, split)
        ragged = [dim for dim in dims if dim in self.ragged]
        if ragged:
            result.realize()
        result = view(result, padded)
        for dim in ragged:
            result = slice_(result, dim, 0, self.shape[dim])
        whole: ir.TensorBox = clone(result) if any(dim > 0 for dim in ragged) else result
        return whole

    def per_block(self, dtype: torch.dtype, body: Load) -> ir.TensorBox:
        """Returns a tensor with one value per block."""
        return elementwise(self.device, dtype, body, self.scale_shape)

    def amax(self, load: Load) -> ir.TensorBox:
        """Returns max |x| of each block in FP32: NaN if it holds a NaN, 0 if the tensor is empty."""
        inside = sorted([*self.dims, *self.wholes])
        if any(self.shape[dim] == 0 for dim in self.wholes):  # Inductor has no maximum of zero elements
            return self.per_block(_F32, lambda _: f32(0.0))

        def inner(block: Index, offsets: Index) -> Any:
            index = self._element(block, inside, offsets)
            return inductor.abs(self.guarded(index, lambda: load(index)))

        return ir.Reduction.create(
            device=self.device,
            dst_dtype=_F32,
            src_dtype=_F32,
            inner_fn=inner,
            ranges=self.scale_shape,
            reduction_ranges=[
                self.shape[dim] if dim in self.wholes else sympy.Integer(self.extents[dim]) for dim in inside
            ],
            reduction_type="max",
        )

    def _element(self, block: Index, dims: Sequence[int], offsets: Index) -> list[Any]:
        """Returns the index of the element at `offsets`, along `dims`, in the block at `block`."""
        index = list(block)
        for dim, offset in zip(dims, offsets, strict=True):
            index[dim] = offset if dim in self.wholes else index[dim] * self.extents[dim] + offset
        return index
