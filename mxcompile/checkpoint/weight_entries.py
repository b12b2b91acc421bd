"""Weights of a checkpoint, assembled from the tensors in its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mxcompile.checkpoint.files import Entry
from mxcompile.errors import CheckpointError
from mxcompile.formats import (
    TWO_LEVEL,
    WHOLE,
    Format,
    ScaleType,
    Tile,
    fp8_form,
    stored_form,
    stored_precision,
)
from mxcompile.formats.encoding import element_values, scale_shape
from mxcompile.formats.types import STORED_FP8_TILES
from mxcompile.storage.weights import StoredWeight

E4M3, E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = (torch.uint8, torch.int8)
"""Dtypes of packed elements."""

MXFP8, MXFP8_E5M2, MXFP4 = stored_form(E4M3), stored_form(torch.float8_e5m2), stored_form(E2M1)
MXINT8 = stored_form(torch.int8)
NVFP4 = stored_form(E2M1, TWO_LEVEL)
FP8_BLOCKS, FP8_CHANNELS = (fp8_form(E4M3, tile) for tile in STORED_FP8_TILES)

SUFFIX = "_scale"
"""Suffix of the name of a scale tensor."""

_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SQUARE = Tile(128, 128)


def stored_weight(
    name: str,
    entry: Entry,
    scale: Entry | None,
    dtype: torch.dtype | None = None,
    *,
    global_scale: Entry | None = None,
    tile: Tile | None = None,
    scale_type: ScaleType | None = None,
) -> StoredWeight:
    """Returns the weight `name`, which a file stores in several tensors: elements `entry` and scales.

    Its format follows from dtypes and shapes. dtype: dtype of the values, if the checkpoint contains it.
    tile: tile of the scales, likewise. scale_type: type of the scales, if their dtype is wider. Raises
    `CheckpointError` if the tensors are inconsistent.
    """
    if scale is None:
        kind, label = ("packed", "MXFP4 or NVFP4") if entry.dtype in BYTES else ("FP8", "MXFP8 or FP8")
        raise CheckpointError(f"{entry} is {kind} but {name + SUFFIX!r} is missing: not an {label} weight")
    is_packed = entry.dtype in BYTES and (entry.dtype is torch.uint8 or entry.name != name)
    form = _form(entry, scale, global_scale, scale_type, is_packed=is_packed)
    shape = list(entry.shape)
    for dim in range(-1, -len(shape) - 1, -1):
        whole = [*shape[:dim], shape[dim] * form.elem.per_byte, *shape[len(shape) + dim + 1 :]]
        for tile_size in _tiles(form, dim, tile):
            expected, actual = scale_shape(whole, dim, tile_size), [*scale.shape]
            if scale.dtype in _FLOATS and len(actual) != len(expected):  # sizes of 1 are optional
                expected, actual = ([size for size in sizes if size != 1] for sizes in (expected, actual))
            if actual == expected:
                parts = [entry, scale] if global_scale is None else [entry, scale, global_scale]
                is_whole = form.scale is ScaleType.FP32 and tile_size.along == WHOLE
                return StoredWeight(
                    name=name,
                    shape=tuple(whole),
                    dtype=dtype,
                    form=replace(form, tile=Tile.CHANNEL) if is_whole else form,
                    block_dim=dim,
                    tensors=tuple(part.name for part in parts),
                    file_tile=tile_size,
                )
    blocks = f", in blocks of {tile} by config.json" if tile is not None else ""
    raise CheckpointError(
        f"{entry} has shape {entry.shape}{blocks}, which scales of {scale.shape} do not fit"
    )


def _form(
    entry: Entry, scale: Entry, global_scale: Entry | None, scale_type: ScaleType | None, *, is_packed: bool
) -> Format:
    """Returns the format of elements and scales. Raises `CheckpointError`.

    is_packed: whether a byte has two elements; else int8 is an element of MXINT8.
    """
    if is_packed and (global_scale is not None or scale.dtype is E4M3):
        if scale.dtype is not E4M3:
            raise CheckpointError(f"{entry} has scales of {scale.dtype}, not E4M3: not an NVFP4 weight")
        if global_scale is None:
            raise CheckpointError(f"{entry} has E4M3 scales but no global scale: not an NVFP4 weight")
        if global_scale.dtype is not torch.float32 or torch.Size(global_scale.shape).numel() != 1:
            raise CheckpointError(
                f"{entry}: {global_scale.name!r} is {global_scale.dtype} of shape {global_scale.shape}, not"
                " one FP32 number: not an NVFP4 weight"
            )
        return NVFP4
    if global_scale is not None:
        raise CheckpointError(
            f"{entry} is {entry.dtype}, but {global_scale.name!r} is a scale of FP4 weights"
        )
    if scale.dtype in _E8M0 or (scale_type is ScaleType.E8M0 and scale.dtype is torch.float32):
        return MXFP4 if is_packed else stored_form(entry.dtype)
    if entry.dtype not in FP8 or scale.dtype not in _FLOATS:
        label = "MXFP4" if is_packed else stored_precision(stored_form(entry.dtype)).label
        raise CheckpointError(f"{entry} has scales of {scale.dtype}, not E8M0 bytes: not an {label} weight")
    return fp8_form(entry.dtype, STORED_FP8_TILES[0])


def _tiles(form: Format, dim: int, tile: Tile | None) -> Sequence[Tile]:
    """Returns the tiles that scales in a file may have. dim: blocked dimension; tile: from config.json."""
    if dim != -1:
        return () if form.scale is ScaleType.FP32 or tile is not None else (form.tile,)
    if tile is not None:
        return (tile,) if not tile.along % form.tile.along else ()
    if form.scale is ScaleType.FP32:
        return Tile.TENSOR, Tile.CHANNEL, _SQUARE, form.tile
    return (form.tile,) if form.two_level else (form.tile, _SQUARE)


def row_scales(scale: Tensor, weight: StoredWeight, where: str) -> Tensor:
    """Returns the scales of `weight` as an `MXTensor` has them: a copy for each row and block of a tile.

    where: file and name for the message. Raises `CheckpointError` if `scale` has no value of the scale type.
    """
    form, tile = weight.form, weight.file_tile
    assert form is not None
    if form.scale is ScaleType.E8M0 and scale.dtype is torch.float32:
        bits = scale.view(torch.int32)
        if ((bits & 0x7FFFFF) != 0).any() or not ((scale > 0) & scale.isfinite()).all():
            raise CheckpointError(
                f"{where} has scales other than powers of two, but scale_fmt in config.json is ue8m0: remove"
                " this key to read them as FP32"
            )
        scale = (bits >> 23).to(torch.uint8)
    elif form.scale is ScaleType.FP32:
        scale = scale.to(torch.float32)
    else:
        scale = scale.view(torch.uint8)
    if tile is None:
        return scale.view(form.scale.stored_dtype)
    dim, shape = weight.block_dim, weight.shape
    expected = scale_shape(shape, dim, form.tile)
    scale = scale.reshape(scale_shape(shape, dim, tile))
    if tile.along > form.tile.along > 0:
        scale = scale.repeat_interleave(tile.along // form.tile.along, -1)[..., : expected[-1]]
    if tile.across > 1:
        scale = scale.repeat_interleave(tile.across, -2)[..., : shape[-2], :]
    return scale.expand(expected).contiguous().view(form.scale.stored_dtype)


def divisor(multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the global scale G of a weight whose file has `multiplier`, a scale that multiplies.

    FP32 numbers near 1 / multiplier are tried: scale / G and scale · multiplier must give the same values in
    `dtype` for all scales and elements. In FP32 the last bit can differ.
    """
    scales = torch.arange(1, 127, dtype=torch.uint8).view(E4M3).to(torch.float32)
    elements = element_values(torch.arange(1, 8), NVFP4.elem)
    steps = torch.tensor([0, -1, 1, -2, 2, -3, 3], dtype=torch.int32)
    near = ((1 / multiplier).view(torch.int32) + steps).view(torch.float32)
    wanted = (scales * multiplier)[:, None] * elements
    values = (scales / near[:, None])[..., None] * elements
    best = (values.to(dtype) != wanted.to(dtype)).sum([1, 2]).argmin()
    return near[best].reshape(1)


def plain_weight(entry: Entry, *, is_read: bool = True) -> StoredWeight:
    """Returns the weight of an unquantized tensor. is_read: whether the model has a parameter for it."""
    return StoredWeight(
        name=entry.name, shape=entry.shape, dtype=entry.dtype, tensors=(entry.name,), is_read=is_read
    )
