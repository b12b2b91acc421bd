"""Copies as values: what a cast makes of a tensor. Operators take a copy as its word (`Copy.of`).

    e4m3 1x32 rceil @-1 codes            elements, and one scale for each tile of the format
    e4m3 32x32 rceil @-2 codes per-row   the same; each row of a square tile has the scale of the tile
    e4m3 1x32 rceil @-1 codes 128x4      the same, scales of each row in the tiles that a chip reads
    e4m3 1x32 rceil @-1 bfloat16         the values that they stand for, without the scale of the tensor
    e4m3 1x32 rceil @-1 elements         elements alone
    e4m3 1x32 rceil @-1 elements bfloat16      the same as numbers of that dtype
    e4m3 1x32 rceil @-1 scales           scales alone

`@` precedes the contraction dimension, counted from the last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats.encoding import decode_tensors, element_values, encode_tensors, scale_shape, scales_of
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


class Part(StrEnum):
    """Which tensors a copy has: elements and scales, or one of them."""

    CODES = "codes"
    ELEMENTS = "elements"
    SCALES = "scales"


Spec = tuple[Sequence[Any], torch.dtype]
"""Shape, of sizes that may be symbolic, and dtype of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy of a tensor.

    format: of its elements and scales. dim: the contraction dimension, counted from the last, which is −1.
    layout: of scales. dtype: of values, or of elements as numbers; None for elements and scales as they are
    stored. part: what there is of it; with a dtype, `Part.CODES` for values.
    """

    format: Format
    dim: int = -1
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    dtype: torch.dtype | None = None
    part: Part = Part.CODES

    def __str__(self) -> str:
        words = [str(self.format), f"@{self.dim}"]
        if self.dtype is None or self.part is not Part.CODES:
            words.append(str(self.part))
        if self.dtype is not None:
            words.append(str(self.dtype).removeprefix("torch."))
        if self.layout is not ScaleLayout.ROW_MAJOR:
            words.append(str(self.layout))
        return " ".join(words)

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
        form, whole = self.format, self.part is Part.CODES
        return whole and form.is_mx and not form.stochastic and not (self.is_square and spread)

    def specs(self, x: Tensor) -> list[Spec]:
        """Returns shape and dtype of each tensor of the copy of `x`.

        Raises `FormatError` for tiled scales of a tensor that is not a matrix.
        """
        if self.dtype is not None:
            return [(x.shape, self.dtype)]
        elements = x.shape, self.elem.dtype
        if self.part is Part.ELEMENTS:
            return [elements]
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
        scales = scale, self.format.scale.dtype
        return [scales] if self.part is Part.SCALES else [elements, scales]

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
        if self.part is Part.SCALES:
            return [self._laid_out(scales_of(x, self.dim, form, amax), x)]
        qdata, scale = encode_tensors(x, self.dim, form, seed, stream, scale, amax)
        if self.part is Part.ELEMENTS:
            return [qdata if self.dtype is None else element_values(qdata, self.elem).to(self.dtype)]
        if self.dtype is not None:
            return [decode_tensors(qdata, scale, self.dim, form, self.dtype)]
        return [qdata, self._laid_out(scale, x)]

    def _laid_out(self, scale: Tensor, x: Tensor) -> Tensor:
        """The scales of tiles of `x` in `layout`."""
        across = self.format.tile.across
        if self.layout is not ScaleLayout.ROW_MAJOR and across > 1:
            other = -3 - self.dim
            scale = scale.repeat_interleave(across, other).narrow(other, 0, x.shape[other])
        if self.is_tiled:
            return tile_scale(scale if self.dim % 2 == 1 else scale.t())
        return scale.contiguous()


@functools.cache
def _copy_of(word: str) -> Copy:
    form, _, rest = word.rpartition(" @")
    dim, *words = rest.split() or [""]
    layouts = [each for each in words if each in list(ScaleLayout)]
    parts = [each for each in words if each in list(Part)]
    dtypes = [each for each in words if isinstance(getattr(torch, each, None), torch.dtype)]
    known = form and dim.lstrip("-").isdecimal() and (parts or dtypes)
    if not known or [*parts[:1], *dtypes[:1], *layouts[:1]] != words:
        raise FormatError(
            f"{word!r} is no copy: expected a format, @ and a dimension, {', '.join(Part)} or a dtype"
        )
    return Copy(
        format=Format.of(form),
        dim=int(dim),
        layout=ScaleLayout(layouts[0]) if layouts else ScaleLayout.ROW_MAJOR,
        dtype=getattr(torch, dtypes[0]) if dtypes else None,
        part=Part(parts[0]) if parts else Part.CODES,
    )
