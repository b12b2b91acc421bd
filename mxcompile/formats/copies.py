"""Copies as values: what a cast makes of a tensor. Operators take a copy as its word (`Copy.of`).

    e4m3 1x32 rceil @-1 codes            elements, and one scale for each tile of the format
    e4m3 32x32 rceil @-2 codes per-row   the same; each row of a square tile has the scale of the tile
    e4m3 1x32 rceil @-1 codes 128x4      the same, scales of each row in the tiles that a chip reads
    e4m3 1x32 rceil @-1 bfloat16         the values that they stand for

`@` precedes the contraction dimension, counted from the last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats.encoding import decode_tensors, encode_tensors, scale_shape
from mxcompile.formats.scale_tiles import tile_scale, tiled_length
from mxcompile.formats.types import (
    ElemType,
    Format,
    Rounding,
    ScaleLayout,
    Tile,
    elem_type,
    rounding,
    scale_layout,
)

_CODES = "codes"

Spec = tuple[Sequence[Any], torch.dtype]
"""Shape, of sizes that may be symbolic, and dtype of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy of a tensor.

    format: of its elements and scales. dim: the contraction dimension, counted from the last, which is −1.
    layout: of scales. dtype: of values; None for elements and scales.
    """

    format: Format
    dim: int = -1
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        form = _CODES if self.dtype is None else str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout is ScaleLayout.ROW_MAJOR else f" {self.layout}"
        return f"{self.format} @{self.dim} {form}{layout}"

    @classmethod
    def of(cls, word: str) -> Copy:
        """The copy that is written `word`. Raises `FormatError` if there is none such."""
        return _copy_of(word)

    @classmethod
    def mx(
        cls,
        dim: int,
        elem_dtype: torch.dtype,
        mode: str,
        square: bool = False,
        layout: str = ScaleLayout.ROW_MAJOR,
        dtype: torch.dtype | None = None,
    ) -> Copy:
        """A copy in MXFP8, scales rounded by `mode`. square: with one scale for 32×32 elements."""
        tile = Tile.SQUARE if square else Tile.ROW
        fmt = Format(elem=elem_type(elem_dtype), rounding=rounding(mode), tile=tile)
        return cls.for_product(fmt, dim, scale_layout(layout), dtype)

    @classmethod
    def for_product(
        cls,
        fmt: Format,
        dim: int,
        layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
        dtype: torch.dtype | None = None,
    ) -> Copy:
        """A copy with the scales that a product of MXFP8 operands reads: those of squares for each row."""
        plain = layout is ScaleLayout.ROW_MAJOR and dtype is None
        # No loop repeats the scales of random elements, which no policy has in squares.
        spread = plain and fmt.tile == Tile.SQUARE and not fmt.stochastic
        return cls(format=fmt, dim=dim, layout=ScaleLayout.PER_ROW if spread else layout, dtype=dtype)

    @property
    def elem(self) -> ElemType:
        """The element type."""
        return self.format.elem

    @property
    def rounding(self) -> Rounding:
        """The rounding of E8M0 scales."""
        assert self.format.rounding is not None, f"{self.format} has no E8M0 scales"
        return self.format.rounding

    @property
    def is_square(self) -> bool:
        """Whether a scale belongs to 32×32 elements."""
        return self.format.tile == Tile.SQUARE

    @property
    def is_tiled(self) -> bool:
        """Whether scales lie in the tiles of a chip."""
        return self.layout is ScaleLayout.TILED_128X4

    @property
    def is_mx(self) -> bool:
        """Whether it is MXFP8 as an MX GEMM reads it, or the values of it."""
        spread = self.dtype is None and self.layout is ScaleLayout.ROW_MAJOR
        return self.format.is_mx and not self.format.stochastic and not (self.is_square and spread)

    def specs(self, x: Tensor) -> list[Spec]:
        """Returns shape and dtype of each tensor of the copy of `x`.

        Raises `FormatError` for tiled scales of a tensor that is not a matrix.
        """
        if self.dtype is not None:
            return [(x.shape, self.dtype)]
        tile = self.format.tile
        if self.layout is not ScaleLayout.ROW_MAJOR:
            tile = Tile(1, tile.along)
        scale = scale_shape(x.shape, self.dim, tile)
        if self.is_tiled:
            if x.ndim != 2:
                raise FormatError(
                    f"scales of a tensor of {x.ndim} dimensions cannot be tiled: only those of a matrix"
                )
            scale = [tiled_length(scale[1 - self.dim % 2], scale[self.dim])]
        return [(x.shape, self.elem.dtype), (scale, self.format.scale.dtype)]

    def tensors(
        self,
        x: Tensor,
        seed: Tensor | None = None,
        stream: int = 0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> list[Tensor]:
        """Returns the tensors of the copy of `x`: elements and scales, or values.

        Further arguments as for `encode_tensors`.
        """
        form = self.format
        self.specs(x)  # whose errors are this one's
        qdata, scale = encode_tensors(x, self.dim, form, seed, stream, scale, amax)
        if self.dtype is not None:
            return [decode_tensors(qdata, scale, self.dim, form, self.dtype, amax)]
        if self.layout is not ScaleLayout.ROW_MAJOR and form.tile.across > 1:
            other = -3 - self.dim
            scale = scale.repeat_interleave(form.tile.across, other).narrow(other, 0, x.shape[other])
        if self.is_tiled:
            return [qdata, tile_scale(scale if self.dim % 2 == 1 else scale.t())]
        return [qdata, scale.contiguous()]


@functools.cache
def _copy_of(word: str) -> Copy:
    form, _, rest = word.rpartition(" @")
    dim, kind, *layout = (*rest.split(), "")[: max(2, len(rest.split()))]
    dtype = None if kind == _CODES else getattr(torch, kind, None)
    if not form or not dim.lstrip("-").isdecimal() or not (kind == _CODES or isinstance(dtype, torch.dtype)):
        raise FormatError(f"{word!r} is no copy: expected a format, @ and a dimension, {_CODES} or a dtype")
    return Copy(
        format=Format.of(form),
        dim=int(dim),
        layout=scale_layout(layout[0]) if layout else ScaleLayout.ROW_MAJOR,
        dtype=dtype,
    )
