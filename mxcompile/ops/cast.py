"""The cast of a tensor to copies, its reverse, and the random Hadamard transform before some casts.

    cast      x → the tensors of each copy of x, then of each copy of y        copies: words (`Copy.parse`)
    decode    qdata, scale → values in `dtype`. qdata alone → elements in `dtype`: uint8 unpacks codes, and
              MI300's types (`FNUZ`) halve the values
    hadamard  x → its transform along a dimension, padded to whole blocks of 16 (see `formats.hadamard`)

Arguments of `cast`. y: a second tensor that gets the same copies. A kernel can then read the common inputs of
x and y once. seed, stream: see `encode_tensors`. scales: for each copy, scales from earlier calls (delayed
scaling, see `state`), or None. amaxes: for each copy in a two-level format, the amax of the tensor
(`largest`), FP32 [1], or of its rows along the contraction, else None.

Arguments of `decode`. scale: row-major, or tiled for matrices (see `scale_tiles`). amax: amax of a tensor
that was cast to two levels, or of its rows. global_scale: divides the scales of the blocks of a weight stored
in two levels. Without `amax` and `global_scale`, two-level values are not multiplied by the scale of the
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import FNUZ, Copy, Format, Tile, num_blocks
from mxcompile.formats.encoding import as_fnuz, decode_tensors, element_values, unpack
from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.formats.scale_tiles import untile_scale
from mxcompile.ops.define import Spec, define


def _cast(
    x: Tensor,
    copies: Sequence[str],
    seed: Tensor | None = None,
    stream: int = 0,
    scales: Sequence[Tensor | None] | None = None,
    amaxes: Sequence[Tensor | None] | None = None,
    y: Tensor | None = None,
) -> list[Tensor]:
    none = [None] * len(copies)
    requested = list(zip(copies, scales or none, amaxes or none, strict=True))
    return [
        tensor
        for source in _sources(x, y)
        for word, scale, amax in requested
        for tensor in Copy.parse(word).tensors(source, seed, stream, scale, amax)
    ]


def _sources(x: Tensor, y: Tensor | None) -> list[Tensor]:
    return [x] if y is None else [x, y]


def decoded(
    qdata: Tensor,
    scale: Tensor | None,
    block_dim: int,
    fmt: str,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Implements `decode`."""
    form = Format.parse(fmt)
    if dtype in FNUZ.values():
        return as_fnuz(qdata)
    if form.packed:
        qdata = unpack(qdata, block_dim, form.elem)
        if dtype is torch.uint8:
            return qdata
    if scale is None:
        return element_values(qdata, form.elem).to(dtype).contiguous()
    if qdata.ndim == 2 and scale.ndim == 1:
        blocks = num_blocks(qdata.shape[block_dim], form.tile.along)
        scale = untile_scale(scale, qdata.shape[1 - block_dim % 2], blocks)
        scale = scale if block_dim % 2 == 1 else scale.t()
    if form.packed:  # scales are bytes, and a square tile has one for each row
        scale = scale.contiguous().view(form.scale.dtype)
        form = replace(form, tile=Tile(1, form.tile.along))
    return decode_tensors(qdata, scale, block_dim, form, dtype, amax, global_scale)


def decoded_shape(stored: Sequence[Any], block_dim: int, form: Format) -> list[Any]:
    """Returns the shape of the elements, in `form`, of data with the shape `stored`."""
    shape = list(stored)
    shape[block_dim] = shape[block_dim] * form.per_byte
    return shape


def _spec_hadamard(x: Tensor, dim: int, signs: int) -> list[Spec]:
    shape = list(x.shape)
    shape[dim] = num_transformed(shape[dim])
    return [(shape, x.dtype)]


cast = define(
    "cast(Tensor x, str[] copies, Tensor? seed=None, int stream=0, Tensor?[]? scales=None,"
    " Tensor?[]? amaxes=None, Tensor? y=None) -> Tensor[]",
    _cast,
    lambda x, copies, seed=None, stream=0, scales=None, amaxes=None, y=None: [
        spec for source in _sources(x, y) for word in copies for spec in Copy.parse(word).specs(source)
    ],
)
decode = define(
    "decode(Tensor qdata, Tensor? scale, int block_dim, str fmt, ScalarType dtype, Tensor? amax=None,"
    " Tensor? global_scale=None) -> Tensor",
    decoded,
    lambda qdata, scale, dim, fmt, dtype, *_: [(decoded_shape(qdata.shape, dim, Format.parse(fmt)), dtype)],
)
hadamard = define("hadamard(Tensor x, int dim, int signs) -> Tensor", transformed, _spec_hadamard)
