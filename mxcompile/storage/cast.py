"""Casts of weights as large as a model's: some rows at a time, so that only source and result are large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import Format, num_blocks
from mxcompile.formats.encoding import encode_stored, gain, tensor_amax
from mxcompile.storage.tensor import MXTensor

_CHUNK = 1 << 19
"""Elements cast at once: a few temporaries of 2 MiB."""


def cast(x: Tensor, block_dim: int, form: Format) -> MXTensor:
    """Returns `x` in `form`, as `mxcompile.quantize` does, with temporaries of a few rows."""
    dim = block_dim % x.ndim
    result = empty(x.shape, dim, form, x.dtype, x.device)
    amax = None
    if form.two_level:
        largest = [tensor_amax(x[rows]) for rows in pieces(x, dim)] or [tensor_amax(x)]
        amax = torch.cat(largest).amax().reshape(1)
    for rows in pieces(x, dim):
        encoded = encode_stored(x[rows], dim, form, amax)
        result.qdata[rows] = encoded.elements
        result.scale_bytes[rows] = encoded.scale_bytes
    if result.global_scale is not None and amax is not None:
        result.global_scale.copy_(gain(amax, form).reshape(result.global_scale.shape))
    return result


def empty(
    shape: Sequence[int], dim: int, form: Format, dtype: torch.dtype, device: torch.device | str
) -> MXTensor:
    """Returns a stored weight of `shape` without values: blocks along `dim`, standing for `dtype`."""
    whole = torch.empty([1] * len(shape), dtype=torch.float32, device=device) if form.two_level else None
    elements, blocks = list(shape), list(shape)
    elements[dim] //= form.elem.per_byte
    blocks[dim] = num_blocks(blocks[dim], form.tile.along)
    qdata = torch.empty(elements, dtype=form.stored_dtype, device=device)
    scale = torch.empty(blocks, dtype=form.scale.stored_dtype, device=device)
    return MXTensor(qdata, scale, dim % len(elements) - len(elements), dtype, whole)


def pieces(x: Tensor, dim: int) -> Iterator[tuple[slice, ...]]:
    """Yields parts of `x` of some `_CHUNK` elements, whole along `dim`."""
    other = max((d for d in range(x.ndim) if d != dim), key=lambda d: x.shape[d], default=None)
    if other is None:
        yield (slice(None),)
        return
    step = max(1, _CHUNK // max(1, x.numel() // max(1, x.shape[other])))
    for start in range(0, x.shape[other], step):
        yield (*[slice(None)] * other, slice(start, start + step))


def sqnr_db(x: Tensor, stored: MXTensor) -> float | None:
    """Returns the ratio of signal to error of `stored`, which stands for `x`, in dB; None if it is exact."""
    signal = error = 0.0
    for rows in pieces(x, stored.block_dim % x.ndim):
        source = x[rows].double()
        part: Any = stored[rows]
        signal += source.square().sum().item()
        error += (source - part.dequantize(torch.float32)).square().sum().item()
    return 10 * math.log10(signal / error) if error > 0 and signal > 0 else None
