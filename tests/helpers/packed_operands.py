"""Packed FP4 operands made directly of codes and scales, and what they stand for in FP64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.operands import embedded
from mxcompile.formats.scale_tiles import tile_scale

NVFP4, MXFP4 = "e2m1 1x16 two-level", "e2m1 1x32 rceil"
NAN = {NVFP4: 0x7F, MXFP4: 0xFF}
ALONG = {NVFP4: 16, MXFP4: 32}

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOperand:
    """One side of a product, seen as [rows, k]: the rows are M of `a`, N of `b`.

    codes: bytes [.., rows, ⌈k/2⌉]. scale: bytes [.., rows, blocks], row-major or, of a matrix, tiled. values:
    FP64 [.., rows, k]. tensor: the scale of the tensor, which `values` has too, FP32 [1]; None of MXFP4.
    """

    codes: Tensor
    scale: Tensor
    values: Tensor
    tensor: Tensor | None

    @property
    def left(self) -> tuple[Tensor, Tensor]:
        """As the operators take a."""
        return self.codes, self.scale

    @property
    def right(self) -> tuple[Tensor, Tensor]:
        """As the operators take b."""
        return self.codes.mT, self.scale if self.scale.ndim == 1 else self.scale.mT


def values(codes: Tensor, scale: Tensor, k: int, word: str) -> Tensor:
    """FP64 values of bytes [.., rows, ⌈k/2⌉] under row-major scales, from the definition of the formats."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :k].long()
    elements = _MAGNITUDES[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    byte = scale.to(torch.float64)
    if word == MXFP4:
        factor = torch.exp2(byte - 127).masked_fill(scale == 255, torch.nan)
    else:
        factor = scale.contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    return elements * factor.repeat_interleave(ALONG[word], -1)[..., :k]


def packed_operand(
    rows: int, k: int, word: str, *, batch: tuple[int, ...] = (), tiled: bool = False, spread: int = 40
) -> PackedOperand:
    """Random codes; scales over many binades, different for every block; NaN around and past the rows."""
    codes = torch.randint(0, 256, (*batch, rows, (k + 1) // 2), dtype=torch.uint8)
    if k % 2:
        codes[..., -1] &= 15
    blocks = -(-k // ALONG[word])
    low, high = (127 - spread, 127 + spread) if word == MXFP4 else (1, 0x7F)
    scale = torch.randint(low, high, (*batch, rows, blocks), dtype=torch.uint8)
    tensor = None if word == MXFP4 else torch.exp2(torch.randn(1) * 4)
    exact = values(codes, scale, k, word)
    if tensor is not None:
        exact = exact * tensor.double()
    if tiled:
        across = torch.nn.functional.pad(scale, (0, -blocks % 4))
        down = torch.full((-rows % 128, across.shape[1]), NAN[word], dtype=torch.uint8)
        scale = tile_scale(torch.cat([across, down]))
    elif not batch:
        codes, scale = embedded(codes, 0x77), embedded(scale, NAN[word])
    return PackedOperand(codes=codes, scale=scale, values=exact, tensor=tensor)


def tensors(*sides: PackedOperand) -> tuple[Tensor, ...]:
    """The scales of both tensors, if there are any."""
    return tuple(side.tensor for side in sides if side.tensor is not None)
