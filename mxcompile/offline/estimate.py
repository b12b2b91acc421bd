"""Estimates the time of a launch from its work and the rates of a chip.

    memory     bytes / (rate · bandwidth)
    issue      instructions of all warps / (rate · issue slots of all SMs)
    mma        tiles of an SM in sequence: max(products at their rate, shared memory traffic) + work between
               two tiles + waits of the products for loads
    latency    waves of programs · batches of loads · memory latency

The estimate is the largest of the four plus a constant for the launch. A block that synchronizes in every
iteration of a loop (e.g. a row reduction), on an SM with few other blocks, overlaps nothing within an
iteration: its memory, issue and latency times add up. Not included: caches (each tensor is read whole and
once), a partial last wave, and lower clocks under power limits. The estimate is not a lower bound,
because a kernel can be faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mxcompile.formats import Format
from mxcompile.lowering.chips.target import Peak
from mxcompile.lowering.choices.families import Family
from mxcompile.lowering.targets import Target
from mxcompile.offline.rates import Range, Rates

_TILES = {"tensor": "fp8_tensor", "channel": "fp8_channel"}

REASONS = ("memory", "issue", "mma", "latency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of a launch, independent of the rates that its chip sustains.

    num_bytes: bytes of device memory traffic. issue_us: time of the instructions with every issue slot in
    use. mma_us: time of the products at the data sheet's rate. product: their kind in `rates`, "" without
    products. shared_us: time of the shared memory traffic of operands. between_issue_us, between_us: time of
    the instructions and of the barriers between two tiles. waits: number of waits of products for loads, in
    sequence. round_trips: waits of a warp for device memory. serial: whether a block synchronizes in every
    iteration.
    """

    num_bytes: float = 0.0
    issue_us: float = 0.0
    mma_us: float = 0.0
    product: str = ""
    shared_us: float = 0.0
    between_issue_us: float = 0.0
    between_us: float = 0.0
    waits: float = 0.0
    round_trips: float = 0.0
    serial: bool = False

    def estimate(self, rates: Rates) -> Estimate:
        """Returns the times of this work by `rates`."""
        latency_us = rates["latency_us"]
        mma_us = 0.0
        if self.product:
            mma_us = max(self.mma_us / rates[self.product], self.shared_us)
            mma_us += self.between_issue_us / rates["issue"] + self.between_us + self.waits * latency_us
        return Estimate(
            memory_us=self.num_bytes / (rates["memory"] * peak_of(rates.target).bandwidth_gbs * 1e3),
            issue_us=self.issue_us / rates["issue"],
            mma_us=mma_us,
            latency_us=self.round_trips * latency_us,
            launch_us=rates["launch_us"],
            serial=self.serial,
        )

    def times(self, factor: float, *, products: float) -> Work:
        """Returns the work multiplied by `factor`, but its products by `products`."""
        items = dataclasses.asdict(self).items()
        more = {name: factor * value for name, value in items if name not in ("product", "serial")}
        return dataclasses.replace(self, **more | {"mma_us": products * self.mma_us})

    def as_data(self) -> dict[str, Any]:
        """Returns the fields that are not zero or empty, times with five digits."""
        items = dataclasses.asdict(self).items()
        return {
            key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in items if value
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The times of a launch in µs. The module docstring defines the parts."""

    memory_us: float
    issue_us: float = 0.0
    mma_us: float = 0.0
    latency_us: float = 0.0
    launch_us: float = 0.0
    serial: bool = False

    @property
    def us(self) -> float:
        """The estimate."""
        streamed = (self.memory_us, self.issue_us, self.latency_us)
        return self.launch_us + max(self.mma_us, sum(streamed) if self.serial else max(streamed))

    @property
    def by(self) -> str:
        """The largest part: "memory", "issue", "mma" or "latency"."""
        return max(REASONS, key=lambda name: float(getattr(self, f"{name}_us")))


def library_work(*, num_bytes: float, flops: float, product: str, target: Target) -> Work:
    """Returns the work of a library kernel. product: kind of its products in `rates`."""
    mma_us = flops / (peak_of(target).tflops(product) * 1e6)
    return Work(num_bytes=num_bytes, mma_us=mma_us, product=product if flops else "")


def product_kind(family: Family, form: Format, target: Target, *, by_library: bool = False) -> str:
    """Returns the kind of rate of a product by `family`, "" if it is emulated.

    form: format of its left operand. by_library: whether the library takes its shape, one matrix.
    """
    match family:
        case Family.FP8:
            return _TILES.get(str(form.tile), "fp8_block")
        case Family.PACKED:
            theirs = by_library and form.two_level and form.scale in target.library_fp4
            return "fp4" if theirs else "own_fp4"
        case Family.MX | Family.AS_MX:
            return "mxfp8" if target.has_library_mx else "own_mxfp8"
        case _:
            return ""


def total(works: Iterable[Work], rates: Rates) -> float:
    """Returns the sum of the estimates in µs."""
    return sum(work.estimate(rates).us for work in works)


def ratio(works: Sequence[Work], others: Sequence[Work], rates: Rates) -> Range:
    """Returns Σ `works` / Σ `others` on one chip. Each rate varies in both sums together."""
    return Range.from_rates(lambda moved: total(works, moved) / total(others, moved), rates)


def peak_of(target: Target) -> Peak:
    """Returns the data sheet of `target`, which must have one."""
    assert target.peak is not None, f"{target.name} has no peaks"
    return target.peak
