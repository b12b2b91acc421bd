"""Operators of watched graphs: they measure casts, and deliver the statistics to listeners.

    cast_statistics  x → statistics of its cast, FP64 [`LENGTH`], and a sample of the cast, FP32 [keep]
    excerpt          x → its rows along a dimension with the largest magnitudes, and their indices, INT64
    nonfinite        scales, or x → the number of NaN and Inf, FP64 [1]; in E8M0 bytes, the number of 255
    deliver          statistics of a run of the graph → listeners

`cast_statistics` computes the reference cast. With the format "" the cast is x in FP32. The sample has values
if scales are powers of two, else elements. All statistics but the first two are sums, so that statistics of
several tensors can be joined. `deliver` has no result, and is the only operator with a side effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from mxcompile.formats import SCALE_NAN, Format, ScaleType
from mxcompile.formats.encoding import (
    decode_tensors,
    element_values,
    encode_tensors,
    outer_amax,
    scale_factors,
)
from mxcompile.ops.define import LIBRARY, define

FIELDS = (
    "amax",
    "smallest",
    "elements",
    "nonzero",
    "underflow",
    "saturated",
    "nan",
    "inf",
    "poisoned",
    "signal",
    "noise",
)
"""amax: largest finite magnitude. smallest: smallest finite magnitude above 0, or inf. elements: number of
elements. nonzero: finite elements except 0. underflow: nonzero elements that become 0. saturated: elements
cut to the largest value. nan, inf: NaN and Inf in x. poisoned: finite elements that become NaN. signal,
noise: sums of x² and of (cast − x)², without elements where either is not finite."""

NUM_BYTES = 256
"""Bins of the histogram of scales behind the fields: E8M0 bytes, or the exponent fields of FP32 scales.

In two levels, a scale is the scale of the tile times the scale of the tensor.
"""

LENGTH = len(FIELDS) + NUM_BYTES

_ANY_STRIDES = torch.Tag.flexible_layout
"""Lets Inductor choose the strides of x as without the operator, so that other kernels do not change."""

_PIECE = 1 << 22
"""Elements that are in FP64 at a time, to bound temporary memory."""


def _cast_statistics(
    x: Tensor,
    block_dim: int,
    fmt: str,
    keep: int,
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    value, stored, histogram = _cast(x, block_dim, fmt, seed, stream, scale)
    limit = Format.parse(fmt).elem.max if fmt else math.inf
    sums = torch.zeros(len(FIELDS), dtype=torch.float64, device=x.device)
    sums[1] = math.inf
    flat = x.flatten()
    for start in range(0, flat.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        part = _sums(flat[piece].to(torch.float64), value[piece], stored[piece], limit)
        largest = torch.maximum(sums[0], part[0])
        smallest = torch.minimum(sums[1], part[1])
        sums = torch.cat([largest.reshape(1), smallest.reshape(1), sums[2:] + part[2:]])
    has_values = not fmt or Format.parse(fmt).pow2 or Format.parse(fmt).scale is ScaleType.E8M0
    return torch.cat([sums, histogram]), _spaced_elements(value if has_values else stored, keep)


def _cast(
    x: Tensor, block_dim: int, fmt: str, seed: Tensor | None, stream: int, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values and elements of the cast, FP32 [elements], and the histogram of its scales."""
    if not fmt:
        value = x.to(torch.float32).flatten()
        return value, value, torch.zeros(NUM_BYTES, dtype=torch.float64, device=x.device)
    form = Format.parse(fmt)
    amax = outer_amax(x, block_dim, form) if form.two_level else None
    qdata, scale = encode_tensors(x, block_dim, form, seed, stream, scale, amax)
    value = decode_tensors(qdata, scale, block_dim, form, torch.float32, amax).flatten()
    stored = element_values(qdata, form.elem).flatten()
    return value, stored, scale_histogram(scale_factors(scale, form, amax) if form.two_level else scale)


def _sums(x: Tensor, value: Tensor, stored: Tensor, limit: float) -> Tensor:
    """Returns the `FIELDS` of `x`, a slice of the flat tensor, in FP64. Other arguments: see `losses`."""
    finite, exact = x.isfinite(), value.isfinite()
    size, lost, cut = losses(x, value, stored, limit)
    nonzero, both = size != 0, finite & exact
    error = torch.where(both, value.to(torch.float64) - x, 0.0)
    finite_x = torch.where(both, x, 0.0)
    counts = torch.ones_like(finite), nonzero, lost, cut, x.isnan(), x.isinf(), finite & ~exact
    return torch.stack(
        [
            size.max(),
            torch.where(nonzero, size, math.inf).min(),
            *(count.sum(dtype=torch.float64) for count in counts),
            finite_x.dot(finite_x),
            error.dot(error),
        ]
    )


def losses(x: Tensor, value: Tensor, stored: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the magnitudes of `x`, 0 for NaN and Inf, and masks of the elements that underflow or saturate.

    value: values of the cast of `x`. stored: its elements without scales. limit: largest element.
    """
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    lost = (size != 0) & (value == 0)
    return size, lost, (stored.abs() == limit) & (size > value.abs())


def scale_histogram(scale: Tensor) -> Tensor:
    """Returns the number of scales with each E8M0 byte, or with each exponent field of FP32 scales."""
    exponents = scale if scale.dtype is torch.uint8 else (scale.view(torch.int32) >> 23) & 0xFF
    counts = torch.zeros(NUM_BYTES, dtype=torch.float64, device=scale.device)
    places = exponents.flatten().to(torch.int64)
    return counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float64))


def _spaced_elements(values: Tensor, keep: int) -> Tensor:
    if not keep:
        return values.new_zeros(0)
    places = torch.arange(keep, device=values.device) * values.numel() // keep
    return values[places]


cast_statistics = define(
    "cast_statistics(Tensor x, int block_dim, str fmt, int keep, Tensor? seed=None, int stream=0,"
    " Tensor? scale=None) -> (Tensor statistics, Tensor kept)",
    _cast_statistics,
    lambda x, block_dim, fmt, keep, *_: [((LENGTH,), torch.float64), ((keep,), torch.float32)],
    _ANY_STRIDES,
)


def excerpt_sizes(sizes: Sequence[int], block_dim: int, limit: int) -> tuple[int, int]:
    """Returns number and length of the rows along `block_dim` in an excerpt of at most `limit` elements."""
    length = sizes[block_dim]
    rows = math.prod(sizes) // length if length else 0
    count = min(rows, max(1, limit // length)) if rows else 0
    return count, min(length, limit)


def _excerpt(x: Tensor, block_dim: int, limit: int) -> tuple[Tensor, Tensor]:
    count, length = excerpt_sizes(x.shape, block_dim, limit)
    rows = x.movedim(block_dim, -1).reshape(-1, x.shape[block_dim])
    if not count:
        return x.new_zeros(0, length), torch.zeros(0, dtype=torch.int64, device=x.device)
    size = torch.maximum(rows.amax(1), -rows.amin(1)).to(torch.float32).nan_to_num(math.inf)
    places = size.topk(count).indices.sort().values
    return rows[places, :length].clone(), places


excerpt = define(
    "excerpt(Tensor x, int block_dim, int limit) -> (Tensor values, Tensor rows)",
    _excerpt,
    lambda x, block_dim, limit: [
        (excerpt_sizes(x.shape, block_dim, limit), x.dtype),
        (excerpt_sizes(x.shape, block_dim, limit)[:1], torch.int64),
    ],
    _ANY_STRIDES,
)


def _nonfinite(x: Tensor) -> Tensor:
    bad = x == SCALE_NAN if x.dtype is torch.uint8 else ~x.to(torch.float32).isfinite()
    return bad.sum(dtype=torch.float64).reshape(1)


nonfinite = define(
    "nonfinite(Tensor x) -> Tensor", _nonfinite, lambda x: [((1,), torch.float64)], _ANY_STRIDES
)

Listener = Callable[[Sequence[Tensor], Sequence[str]], object]
"""Receives the results of `nonfinite`, or of `cast_statistics` and `excerpt`, and a word for each cast."""

_LISTENERS: list[Listener] = []


def listen(listener: Listener) -> None:
    """Adds `listener`, which each `deliver` of this process calls in the thread that runs the graph."""
    _LISTENERS.append(listener)


def _deliver(values: Sequence[Tensor], sites: Sequence[str]) -> None:
    for listener in _LISTENERS:
        listener(values, sites)


LIBRARY.define("deliver(Tensor[] values, str[] sites) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("deliver", _deliver, "CompositeExplicitAutograd")
torch.library.register_fake("mx::deliver", lambda values, sites: None, lib=LIBRARY)
deliver = torch.ops.mx.deliver.default
fx.node.has_side_effect(deliver)
