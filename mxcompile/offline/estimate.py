"""How long a launch takes, reckoned from what it has to do and from the rates of a chip: an estimate.

    memory     bytes / (rate · bandwidth)
    issue      instructions of all warps / (rate · issue slots of all processors)
    mma        tiles of a processor, one after the other: max(products at their rate, bytes through shared
               memory) + what runs between two tiles + what the products wait for
    latency    turns of programs · batches of loads · latency of memory

The largest of the four counts, and a constant for the launch. Where a block waits for itself in every round
of a loop, as in a reduction of each row, and its processor has hardly another, nothing of a round runs beside
the rest of it: there memory, issue and latency add up. Not in it: caches (bytes are those of whole tensors,
once), a last turn that is not full, clocks that sink under power. It is not a lower bound, because a kernel
may be faster than its estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mxcompile.lowering.chips.peak import Peak
from mxcompile.lowering.targets import Target
from mxcompile.offline.rates import Range, Rates

REASONS = ("memory", "issue", "mma", "latency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of a launch, apart from how fast its chip does it.

    num_bytes: of device memory. issue_us: of its instructions if every slot were used. mma_us: of its
    products at the data sheet's rate. product: the kind of `rates` that these reach, "" without products.
    shared_us: of what they read from and loads write to shared memory. between_issue_us, between_us: between
    two tiles, instructions in every slot and barriers. waits: of products for loads, one after the other, as
    round_trips: of a warp for device memory. serial: whether a block waits for itself in every round.
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
        """The times of this work by `rates`."""
        latency_us = rates["latency_us"]
        mma_us = 0.0
        if self.product:
            mma_us = max(self.mma_us / rates[self.product], self.shared_us)
            mma_us += self.between_issue_us / rates["issue"] + self.between_us + self.waits * latency_us
        return Estimate(
            memory_us=self.num_bytes / (rates["memory"] * _peak(rates.target).bandwidth_gbs * 1e3),
            issue_us=self.issue_us / rates["issue"],
            mma_us=mma_us,
            latency_us=self.round_trips * latency_us,
            launch_us=rates["launch_us"],
            serial=self.serial,
        )

    def times(self, factor: float, *, products: float | None = None) -> Work:
        """`factor` times as much of everything; of products as often as that says."""
        names = (
            "num_bytes",
            "issue_us",
            "shared_us",
            "between_issue_us",
            "between_us",
            "waits",
            "round_trips",
        )
        more = {name: factor * getattr(self, name) for name in names}
        return dataclasses.replace(
            self, **more, mma_us=self.mma_us * (factor if products is None else products)
        )

    def as_data(self) -> dict[str, Any]:
        """Returns the fields that differ from no work at all, times with five digits."""
        items = dataclasses.asdict(self).items()
        return {
            key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in items if value
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The times of a launch in µs, and what makes most of it (see above)."""

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
    """Returns the work of a library's kernel. product: the kind of `rates` of its products."""
    peak = _peak(target)
    tflops = {
        "fp32": peak.fp32_tflops,
        "mxfp8": peak.mxfp8_tflops,
        "own_mxfp8": peak.mxfp8_tflops,
        "fp4": peak.fp4_tflops,
        "own_fp4": peak.fp4_tflops,
        "fp8_tensor": peak.fp8_tflops,
        "fp8_channel": peak.fp8_tflops,
        "fp8_block": peak.fp8_tflops,
    }.get(product, peak.bf16_tflops)
    return Work(num_bytes=num_bytes, mma_us=flops / (tflops * 1e6), product=product if flops else "")


def total(works: Iterable[Work], rates: Rates) -> float:
    """Σ of the estimates in µs."""
    return sum(work.estimate(rates).us for work in works)


def ratio(works: Sequence[Work], others: Sequence[Work], rates: Rates) -> Range:
    """Σ of `works` over Σ of `others`, on one chip: a rate that both depend on moves both."""
    return Range.of(lambda moved: total(works, moved) / total(others, moved), rates)


def _peak(target: Target) -> Peak:
    assert target.peak is not None, f"{target.name} has no peaks"
    return target.peak
