"""Casts to `MXTensor`: `quantize` casts a whole tensor, `cast` chunks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mxcompile.formats import Format, stored_form
from mxcompile.formats.encoding import encode_stored, scale_shape, tensor_amax
from mxcompile.formats.numerics import check_source
from mxcompile.formats.two_level import gain
from mxcompile.storage.pages import on_huge_pages
from mxcompile.storage.tensor import MXTensor, encoded

_CHUNK = 1 << 19
"""Elements per chunk, which limits temporaries to a few times 2 MiB."""


def quantize(
    x: Tensor, *, block_dim: int = -1, elem_dtype: torch.dtype = torch.float8_e4m3fn, rounding: str = "rceil"
) -> MXTensor:
    """Casts `x` to an MX format or NVFP4 in blocks along `block_dim`: 32 elements for MX, 16 for NVFP4.

    Elements round to nearest even and saturate. A block that contains NaN or Inf becomes NaN; in NVFP4, the
    whole tensor becomes NaN.

    Args:
        x: A tensor of any float dtype (FP64 is rounded to FP32 first), rank ≥ 1 and any length; the length
            along `block_dim` must be even for FP4. The last block may be shorter.
        block_dim: The dimension along which blocks run.
        elem_dtype: ``torch.float8_e4m3fn``, ``torch.float8_e5m2``, ``torch.int8`` for MXINT8, or
            ``torch.float4_e2m1fn_x2`` for FP4.
        rounding: Rounding of the scale: ``rceil`` (arXiv 2506.08027), ``floor`` (OCP MX v1.0), ``ceil``,
            ``even``; or ``two-level`` for NVFP4, whose E4M3 scales also depend on the amax of `x`.

    Returns:
        An `MXTensor` with the dtype of `x`, without gradient.

    Raises:
        FormatError: The dtype, dimension or length is not supported.

    Examples:
        >>> w = mxcompile.quantize(torch.randn(64, 128, dtype=torch.bfloat16))
        >>> w.qdata.dtype, w.scale.shape
        (torch.float8_e4m3fn, torch.Size([64, 4]))
    """
    check_source(x, block_dim)
    return encoded(x, block_dim, stored_form(elem_dtype, rounding))


def cast(x: Tensor, block_dim: int, form: Format) -> MXTensor:
    """Returns `x` in `form`, bit-identical to `quantize`, with temporaries for a few rows only.

    If `x` is an `MXTensor`, its values in FP32 are cast.
    """
    dim = block_dim % x.ndim
    result = empty(x.shape, dim, form, x.dtype, x.device)
    amax = None
    if form.two_level:
        largest = [tensor_amax(_values(x, rows)) for rows in pieces(x, dim)] or [tensor_amax(_values(x, ()))]
        amax = torch.cat(largest).amax().reshape(1)
    for rows in pieces(x, dim):
        encoded = encode_stored(_values(x, rows), dim, form, amax)
        result.qdata[rows] = encoded.elements
        result.scale_bytes[rows] = encoded.scale_bytes
    if result.global_scale is not None and amax is not None:
        result.global_scale.copy_(gain(amax, form).reshape(result.global_scale.shape))
    return result


def empty(
    shape: Sequence[int], dim: int, form: Format, dtype: torch.dtype, device: torch.device | str
) -> MXTensor:
    """Returns an uninitialized `MXTensor` of `shape` with blocks along `dim`; dtype: dtype of the values."""
    whole = torch.empty([1] * len(shape), dtype=torch.float32, device=device) if form.two_level else None
    elements, blocks = list(shape), scale_shape(shape, dim, form.tile)
    elements[dim] //= form.elem.per_byte
    qdata = on_huge_pages(torch.empty(elements, dtype=form.stored_dtype, device=device))
    scale = torch.empty(blocks, dtype=form.scale.stored_dtype, device=device)
    return MXTensor(qdata, scale, dim % len(elements) - len(elements), dtype, whole)


def pieces(x: Tensor, dim: int) -> Iterator[tuple[slice, ...]]:
    """Yields slices of `x` with about `_CHUNK` elements each, undivided along `dim`."""
    other = max((d for d in range(x.ndim) if d != dim), key=lambda d: x.shape[d], default=None)
    if other is None:
        yield (slice(None),)
        return
    step = max(1, _CHUNK // max(1, x.numel() // max(1, x.shape[other])))
    for start in range(0, x.shape[other], step):
        yield (*[slice(None)] * other, slice(start, start + step))


def _values(x: Tensor, rows: tuple[slice, ...]) -> Tensor:
    """Returns `rows` of `x`. Rows of an `MXTensor` are dequantized to FP32."""
    part = x[rows]
    return part.dequantize(torch.float32) if isinstance(part, MXTensor) else part


def sqnr_db(x: Tensor, stored: MXTensor) -> float | None:
    """Returns the signal-to-quantization-noise ratio of `stored` against `x` in dB; None if exact."""
    signal = error = 0.0
    for rows in pieces(x, stored.block_dim % x.ndim):
        source = _values(x, rows).double()
        signal += source.square().sum().item()
        error += (source - _values(stored, rows)).square().sum().item()
    return 10 * math.log10(signal / error) if error > 0 and signal > 0 else None
