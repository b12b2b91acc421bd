"""`quantize` and `MXTensor`: MXFP8 data as a value, for users and tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats import BLOCK, elem_type, num_blocks
from mxcompile.formats.numerics import check_source, dequantize_tensors, quantize_tensors


@dataclass(frozen=True, slots=True, eq=False)
class MXTensor:
    """A tensor in MXFP8: elements and the scales of their blocks.

    qdata: `torch.float8_e4m3fn` or `torch.float8_e5m2`, the shape of the source.
    scale: `torch.float8_e8m0fnu`, multiplies on dequantize, length ⌈n/32⌉ along `block_dim`.
    block_dim: the dimension blocks run along, kept as given (negative counts from the end).
    """

    qdata: Tensor
    scale: Tensor
    block_dim: int = -1

    def __post_init__(self) -> None:
        elem_type(self.qdata.dtype)
        if self.scale.dtype is not torch.float8_e8m0fnu:
            raise FormatError(f"scale must be torch.float8_e8m0fnu, not {self.scale.dtype}")
        if not -self.qdata.ndim <= self.block_dim < self.qdata.ndim:
            raise FormatError(f"block_dim {self.block_dim} is outside qdata of {self.qdata.ndim} dimensions")
        expected = list(self.qdata.shape)
        expected[self.block_dim] = num_blocks(expected[self.block_dim])
        if list(self.scale.shape) != expected:
            raise FormatError(
                f"scale has shape {tuple(self.scale.shape)}; qdata {tuple(self.qdata.shape)} in blocks"
                f" of {BLOCK} along dimension {self.block_dim} needs {tuple(expected)}"
            )

    @property
    def shape(self) -> torch.Size:
        """Shape of the source tensor."""
        return self.qdata.shape

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Element · scale, computed exactly and rounded once to `dtype`.

        Blocks whose scale is NaN (byte 255) are NaN. Raises `FormatError` for a non-float dtype.
        """
        if not dtype.is_floating_point:
            raise FormatError(f"cannot dequantize to {dtype}: not a floating-point dtype")
        return dequantize_tensors(self.qdata, self.scale.view(torch.uint8), self.block_dim, dtype)


def quantize(
    x: Tensor,
    *,
    block_dim: int = -1,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "rceil",
) -> MXTensor:
    """Cast `x` to MXFP8 in blocks of 32 along `block_dim`.

    x: any float dtype (FP64 is rounded to FP32 first), any rank ≥ 1, any length; a short last block is
    a block. elem_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`. rounding, of the scale: ``rceil``
    (arXiv 2506.08027), ``floor`` (OCP MX v1.0), ``ceil``, ``even``. Elements round to nearest even and
    saturate; a block holding NaN or Inf becomes NaN. Raises `FormatError`.
    """
    check_source(x, block_dim)
    qdata, scale = quantize_tensors(x, block_dim, elem_dtype, rounding)
    return MXTensor(qdata, scale.view(torch.float8_e8m0fnu), block_dim)
