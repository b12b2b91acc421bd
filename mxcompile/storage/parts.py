"""Consistency of the parts of an `MXTensor`: the format and shape that follow from qdata and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats import TWO_LEVEL, Format, Rounding, Tile, fp8_form, stored_form
from mxcompile.formats.encoding import scale_shape
from mxcompile.formats.types import STORED_FP8_TILES


def checked_form(
    qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype, global_scale: Tensor | None
) -> Format:
    """Returns the format of an `MXTensor` with these parts. Raises `FormatError` if they are inconsistent."""
    if not -qdata.ndim <= block_dim < qdata.ndim:
        raise FormatError(f"block_dim {block_dim} is outside qdata of {qdata.ndim} dimensions")
    form = stored_form(qdata.dtype, Rounding.RCEIL if global_scale is None else TWO_LEVEL)
    if scale.dtype is torch.float32 and global_scale is None and form.elem.packed is None:
        has_blocks = scale.ndim == qdata.ndim and scale.shape[block_dim] != 1  # 0 of no elements
        form = fp8_form(qdata.dtype, STORED_FP8_TILES[0] if has_blocks else Tile.CHANNEL)
    if scale.dtype is not form.scale.stored_dtype:
        word = "without" if global_scale is None else "beside"
        raise FormatError(f"scale must be {form.scale.stored_dtype} {word} a global scale, not {scale.dtype}")
    shape = list(qdata.shape)
    shape[block_dim] *= form.elem.per_byte
    expected = scale_shape(shape, block_dim, form.tile)
    if list(scale.shape) != expected:
        raise FormatError(
            f"scale has shape {tuple(scale.shape)}; qdata {tuple(qdata.shape)} in blocks"
            f" of {form.tile} along dimension {block_dim} needs {tuple(expected)}"
        )
    if scale.device != qdata.device:
        raise FormatError(f"qdata is on {qdata.device}, scale on {scale.device}")
    if not dtype.is_floating_point:
        raise FormatError(f"an MXTensor stands for floating-point values, not {dtype}")
    if global_scale is None:
        return form
    if global_scale.dtype is not torch.float32:
        raise FormatError(f"global_scale must be torch.float32, not {global_scale.dtype}")
    if global_scale.device != qdata.device:
        raise FormatError(f"qdata is on {qdata.device}, global_scale on {global_scale.device}")
    whole = list(qdata.shape)
    whole[block_dim] = 1
    fits = global_scale.ndim == qdata.ndim and all(
        size_there in (1, size) for size_there, size in zip(global_scale.shape, whole, strict=True)
    )
    if not fits:
        raise FormatError(
            f"global_scale has shape {tuple(global_scale.shape)}; qdata {tuple(qdata.shape)} in blocks along"
            f" dimension {block_dim} takes one number, or sizes of 1 or as in {tuple(whole)}"
        )
    return form


def unpacked_layout(qdata: Tensor, block_dim: int, per_byte: int) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the shape and strides of the elements in `qdata`, with `per_byte` elements in a byte."""
    if per_byte == 1:
        return qdata.shape, qdata.stride()
    dim, shape, strides = block_dim % qdata.ndim, list(qdata.shape), list(qdata.stride())
    shape[dim] *= per_byte
    inner = strides[dim]
    return shape, [stride * per_byte if stride > inner else stride for stride in strides]
