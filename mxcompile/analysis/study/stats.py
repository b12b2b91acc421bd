"""Streaming statistics of casts and GEMMs: tensors are processed in pieces and not kept.

All sums are in FP64 of the exact FP32 values. `mxcompile.report.data.numerics` defines the measures.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mxcompile.formats import Format, Tile
from mxcompile.formats.encoding import decode_tensors, element_values, outer_amax, scale_factors
from mxcompile.ops import grouped_product
from mxcompile.ops.watch import losses, scale_histogram
from mxcompile.report.data.fold import grouped
from mxcompile.report.data.numerics import lowest
from mxcompile.storage.cast import pieces

_T = TypeVar("_T", bound=Hashable)
PIECE = 1 << 20
"""Elements per piece."""


@dataclass(kw_only=True, slots=True)
class Sums:
    """Sums for the error measures of q against x."""

    numel: int = 0
    signal: float = 0.0
    output: float = 0.0
    cross: float = 0.0
    noise: float = 0.0
    not_finite: int = 0

    def add(self, x: Tensor, q: Tensor) -> None:
        """Adds `q`, the quantized counterpart of `x`, of the same shape."""
        x, q = x.to(torch.float64).flatten(), q.to(torch.float64).flatten()
        error = q - x
        sums = torch.stack([x.dot(x), q.dot(q), x.dot(q), error.dot(error)])
        signal, output, cross, noise = sums.tolist()
        self.numel += x.numel()
        self.signal += signal
        self.output += output
        self.cross += cross
        self.noise += noise
        if not math.isfinite(noise):
            self.not_finite += int((~(x.isfinite() & q.isfinite())).sum())

    @property
    def sqnr_db(self) -> float:
        """10 · log10(signal / noise)."""
        if math.isnan(self.noise) or math.isinf(self.noise) or math.isinf(self.signal):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between x and q; 1 if both are 0."""
        if self.signal == 0 and self.output == 0:
            return 1.0
        scale = math.sqrt(self.signal) * math.sqrt(self.output)
        return self.cross / scale if scale else 0.0

    @property
    def mse(self) -> float:
        """Mean squared error; 0 without elements."""
        return self.noise / self.numel if self.numel else 0.0

    @property
    def rel_error(self) -> float:
        """√(noise / signal)."""
        if self.noise == 0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf


@dataclass(kw_only=True, slots=True)
class CastStats:
    """Statistics of all calls of one cast.

    finite: number of finite elements. nonzero: number of finite nonzero elements. underflow: nonzero elements
    cast to 0. saturation: finite elements clipped to the largest value. magnitude, lost: sum of the
    magnitudes of all finite elements, and of elements cast to 0.
    """

    sums: Sums = field(default_factory=Sums)
    calls: int = 0
    amax: float = 0.0
    finite: int = 0
    nonzero: int = 0
    underflow: int = 0
    saturation: int = 0
    magnitude: float = 0.0
    lost: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * 256)

    def add(self, x: Tensor, qdata: Tensor, scale: Tensor, block_dim: int, fmt: Format) -> None:
        """Adds one call, which cast `x` to `qdata` and `scale` along `block_dim`."""
        self.calls += 1
        amax = outer_amax(x, block_dim, fmt) if fmt.two_level else None
        factors = scale_factors(scale, fmt, amax) if fmt.two_level else scale
        counts = scale_histogram(factors).tolist()
        self.histogram = [before + int(now) for before, now in zip(self.histogram, counts, strict=True)]
        if fmt.is_mx:
            fmt = replace(fmt, tile=Tile.ROW)  # scales of 32x32 blocks are stored for every row
        parts: Iterable[Any] = pieces(x, block_dim) if fmt.is_mx else [...]
        for part in parts if x.numel() else ():
            value = decode_tensors(qdata[part], scale[part], block_dim, fmt, torch.float32, amax)
            source, stored = x[part].to(torch.float32), element_values(qdata[part], fmt.elem)
            self.sums.add(source, value)
            size, lost, cut = losses(source, value, stored, fmt.elem.max)
            self.amax = max(self.amax, size.max().item())
            self.finite += int(source.isfinite().sum())
            self.nonzero += int(size.count_nonzero())
            self.saturation += int(cut.sum())
            self.underflow += int(lost.sum())
            self.magnitude += size.sum(dtype=torch.float64).item()
            self.lost += size[lost].sum(dtype=torch.float64).item()


@dataclass(kw_only=True, slots=True)
class ProductStats:
    """Statistics of all calls of one GEMM."""

    sums: Sums = field(default_factory=Sums)
    calls: int = 0

    def add(self, out: Tensor, lhs: Tensor, rhs: Tensor, bias: Tensor | None) -> None:
        """Adds one call with the result `out`, against left[…, m, k] · right[…, k, n] + bias in FP32."""
        self.calls += 1
        added = None if bias is None else _as_batch(bias.expand(out.shape))
        batches = map(_as_batch, (out, lhs, rhs))
        for index, (y, a, b) in enumerate(zip(*batches, strict=True)):
            b32 = b.to(torch.float32)
            step = max(1, PIECE // max(1, *b.shape))
            for start in range(0, y.shape[0], step):
                rows = slice(start, start + step)
                reference = a[rows].to(torch.float32) @ b32
                if added is not None:
                    reference = reference + added[index, rows]
                self.sums.add(reference, y[rows])

    def add_grouped(self, out: Tensor, lhs: Tensor, rhs: Tensor, offs: Tensor) -> None:
        """Adds one call with the result `out`, against an FP32 product per group as in `aten._grouped_mm`."""
        self.calls += 1
        self.sums.add(grouped_product(lhs.to(torch.float32), rhs.to(torch.float32), offs), out)


def _as_batch(matrices: Tensor) -> Tensor:
    """Returns […, m, n] as [batch, m, n], also for empty tensors."""
    return matrices.unsqueeze(0).flatten(0, -3)


def lowest_by(pairs: Iterable[tuple[_T, float]]) -> dict[_T, float]:
    """Returns the lowest value of every key, in the order of their first values; nan if any value is nan."""
    by_key = grouped(pairs, lambda pair: pair[0])
    return {key: lowest(value for _, value in group) for key, group in by_key.items()}
