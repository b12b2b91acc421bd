"""The copies that a cast makes of a tensor. Operators take a copy as its word, which `Copy.parse` parses.

    e4m3 1x32 rceil @-1 codes            elements, and one scale for each tile
    e4m3 32x32 rceil @-2 codes per-row   elements, and the scale of its square tile for each row
    e4m3 1x32 rceil @-1 codes 128x4      elements, and the scales of each row in the order of `scale_tiles`
    e4m3 1x32 rceil @-1 bfloat16         values: elements · scales of tiles, without the scale of the tensor
    e4m3 1x32 rceil @-1 elements         elements without scales
    e4m3 1x32 rceil @-1 elements bfloat16      elements without scales, converted to that dtype
    e4m3 1x32 rceil @-1 scales           scales without elements
    e4m3 channel nearest @-2 elements transposed fnuz  elements of half the value, the contraction innermost
    e4m3 tensor nearest @-1 largest      the amax of the tensor, FP32 [1]
    e2m1 1x16 two-level hadamard:9 packed @-2 largest    the amax of the transformed tensor, FP32 [1]
    e2m1 1x32 rceil packed @-2 codes transposed      packed elements and scales, the contraction innermost

`@` precedes the contraction dimension, counted from the last (−1).

A byte of a packed copy holds two codes that are neighbours along the contraction, the first in its low half,
as in `torch.float4_e2m1fn_x2`. If the length is odd, the high half of the last byte is 0. The scales are
bytes, one for each block along the contraction in each row. If the format has a transform (`hadamard`), a
packed copy is cast from the transformed tensor, and its amax is the transformed tensor's. Other copies ignore
the transform, because `mx.hadamard` runs before their cast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats.elements import FNUZ, ElemType
from mxcompile.formats.encoding import (
    as_fnuz,
    decode_tensors,
    element_values,
    encode_tensors,
    pack,
    scale_shape,
    scales_of,
    tensor_amax,
)
from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.formats.scale_tiles import tile_scale, tiled_length
from mxcompile.formats.types import Format, Rounding, ScaleLayout, Tile, num_blocks

_TRANSPOSED, _FNUZ = "transposed", "fnuz"


class CopyPart(StrEnum):
    """The tensors of a copy: elements and scales, elements, scales, or the amax of the tensor."""

    CODES = "codes"
    ELEMENTS = "elements"
    SCALES = "scales"
    LARGEST = "largest"


Spec = tuple[Sequence[Any], torch.dtype]
"""Shape and dtype of a tensor; sizes may be symbolic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy of a tensor.

    format: format of elements and scales. dim: contraction dimension, counted from the last (−1). layout:
    layout of scales. dtype: dtype of values, or of elements converted to numbers; None for elements and
    scales in their own dtypes. part: tensors of the copy; with a dtype, `CopyPart.CODES` means values.
    transposed: whether the last two dimensions of elements and scales are swapped, so that the contraction of
    a columnwise copy is innermost. fnuz: whether elements have MI300's types and half the value (`as_fnuz`).
    """

    format: Format
    dim: int = -1
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    dtype: torch.dtype | None = None
    part: CopyPart = CopyPart.CODES
    transposed: bool = False
    fnuz: bool = False

    def __str__(self) -> str:
        words = (
            *(self.format, f"@{self.dim}"),
            self.part if self.dtype is None or self.part is not CopyPart.CODES else "",
            "" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            *(_TRANSPOSED if self.transposed else "", _FNUZ if self.fnuz else ""),
            self.layout if self.layout is not ScaleLayout.ROW_MAJOR else "",
        )
        return " ".join(filter(None, map(str, words)))

    @classmethod
    def parse(cls, word: str) -> Copy:
        """Parses `word`. Raises `FormatError` if a part is missing, unknown or out of order."""
        return _copy_of(word)

    @classmethod
    def for_product(cls, fmt: Format, dim: int) -> Copy:
        """Returns a copy with the scales that an MX GEMM reads: one for each row, also in square tiles."""
        # The lowering of stochastic casts cannot repeat scales; policies combine them with no square tile.
        spread = fmt.tile == Tile.SQUARE and not fmt.stochastic
        layout = ScaleLayout.PER_ROW if spread else ScaleLayout.ROW_MAJOR
        return cls(format=fmt, dim=dim, layout=layout)

    @classmethod
    def packed(cls, fmt: Format, dim: int, layout: ScaleLayout = ScaleLayout.ROW_MAJOR) -> Copy:
        """Returns a packed copy with the contraction innermost, as the FP4 instructions of chips read it."""
        return cls(format=replace(fmt, packed=True), dim=dim, layout=layout, transposed=dim == -2)

    @property
    def elem(self) -> ElemType:
        """The element type."""
        return self.format.elem

    @property
    def rounding(self) -> Rounding:
        """The rounding of E8M0 scales, which the format must have."""
        assert self.format.rounding is not None, f"{self.format} has no E8M0 scales"
        return self.format.rounding

    @property
    def is_square(self) -> bool:
        """Whether tiles are 32×32."""
        return self.format.tile == Tile.SQUARE

    @property
    def is_tiled(self) -> bool:
        """Whether scales are in the 128×4 layout (see `scale_tiles`)."""
        return self.layout is ScaleLayout.TILED_128X4

    @property
    def is_mx(self) -> bool:
        """Whether it is MXFP8 without stochastic rounding, as values or as an MX GEMM reads it."""
        spread = self.dtype is None and self.layout is ScaleLayout.ROW_MAJOR
        form, whole = self.format, self.part is CopyPart.CODES
        return whole and form.is_mx and not form.stochastic and not (self.is_square and spread)

    def specs(self, x: Tensor) -> list[Spec]:
        """Returns shape and dtype of each tensor of the copy of `x`.

        Raises `FormatError` for tiled scales if `x` is not a matrix, and for a transform along rows.
        """
        form, shape = self.format, list(x.shape)
        if self.part is CopyPart.LARGEST:
            return [([1], torch.float32)]
        if self.dtype is not None:
            return [(shape, self.dtype)]
        if form.packed and form.hadamard is not None:
            if self.dim != -2:
                raise FormatError(
                    f"cannot cast along rows to {form}: its Hadamard transform runs along columns"
                )
            shape[self.dim] = num_transformed(shape[self.dim])
        tile = form.tile
        if form.packed or self.layout is not ScaleLayout.ROW_MAJOR:
            tile = Tile(1, tile.along)
        scale = scale_shape(shape, self.dim, tile)
        if self.is_tiled:
            if x.ndim != 2:
                raise FormatError(
                    f"scales can be tiled for a matrix only, found a tensor of {x.ndim} dimensions"
                )
            scale = [tiled_length(scale[1 - self.dim % 2], scale[self.dim])]
        shape[self.dim] = num_blocks(shape[self.dim], form.per_byte)
        if self.transposed:
            shape, scale = _swapped(shape), scale if self.is_tiled else _swapped(scale)
        elements: Spec = (shape, FNUZ[self.elem.dtype] if self.fnuz else self.elem.dtype)
        scales: Spec = (scale, torch.uint8 if form.packed else form.scale.dtype)
        return {CopyPart.CODES: [elements, scales], CopyPart.ELEMENTS: [elements], CopyPart.SCALES: [scales]}[
            self.part
        ]

    def tensors(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        stream: int = 0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> list[Tensor]:
        """Returns the tensors of the copy of `x`, as `specs` describes them.

        seed, stream, scale, amax: see `encode_tensors`. Raises `FormatError` as `specs` and `encode_tensors`.
        """
        form = self.format
        self.specs(x)  # raises its errors
        if form.packed and form.hadamard is not None:
            x, form = transformed(x, self.dim, form.hadamard), form.untransformed
        if self.part is CopyPart.LARGEST:
            return [tensor_amax(x)]
        if self.part is CopyPart.SCALES:
            return [self._laid_out(scales_of(x, self.dim, form, amax), x)]
        qdata, scale = encode_tensors(x, self.dim, form, seed, stream, scale, amax)
        if self.dtype is not None and self.part is CopyPart.CODES:
            return [decode_tensors(qdata, scale, self.dim, form, self.dtype)]
        if self.dtype is not None:
            return [element_values(qdata, self.elem).to(self.dtype)]
        if form.packed:
            odd = qdata.narrow(self.dim, 0, qdata.shape[self.dim] % form.per_byte)
            qdata = pack(torch.cat([qdata, torch.zeros_like(odd)], self.dim), self.dim, self.elem)
        qdata = as_fnuz(qdata) if self.fnuz else qdata
        qdata = qdata.mT.contiguous() if self.transposed else qdata
        return [qdata] if self.part is CopyPart.ELEMENTS else [qdata, self._laid_out(scale, x)]

    def _laid_out(self, scale: Tensor, x: Tensor) -> Tensor:
        """Returns `scale`, one scale for each tile of `x`, in `layout`."""
        across = self.format.tile.across
        if self.format.packed:
            scale = scale.view(torch.uint8)
        if across > 1 and (self.format.packed or self.layout is not ScaleLayout.ROW_MAJOR):
            other = -3 - self.dim
            scale = scale.repeat_interleave(across, other).narrow(other, 0, x.shape[other])
        if self.is_tiled:
            return tile_scale(scale if self.dim % 2 == 1 else scale.t())
        return (scale.mT if self.transposed else scale).contiguous()


def _swapped(shape: Sequence[Any]) -> list[Any]:
    return [*shape[:-2], shape[-1], shape[-2]]


@functools.cache
def _copy_of(word: str) -> Copy:
    form, _, rest = word.rpartition(" @")
    dim, *words = rest.split() or [""]
    layouts = [part for part in words if part in list(ScaleLayout)]
    parts = [part for part in words if part in list(CopyPart)]
    dtypes = [part for part in words if isinstance(getattr(torch, part, None), torch.dtype)]
    turned, halved = ([part for part in words if part == word] for word in (_TRANSPOSED, _FNUZ))
    is_valid = form and dim.removeprefix("-").isdecimal() and (parts or dtypes)
    if not is_valid or [*parts[:1], *dtypes[:1], *turned[:1], *halved[:1], *layouts[:1]] != words:
        raise FormatError(
            f"{word!r} is not a copy: expected a format, @ and a dimension, {', '.join(CopyPart)} or a dtype"
        )
    return Copy(
        format=Format.parse(form),
        dim=int(dim),
        layout=ScaleLayout(layouts[0]) if layouts else ScaleLayout.ROW_MAJOR,
        dtype=getattr(torch, dtypes[0]) if dtypes else None,
        part=CopyPart(parts[0]) if parts else CopyPart.CODES,
        transposed=bool(turned),
        fnuz=bool(halved),
    )
