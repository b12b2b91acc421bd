"""Data sheets of chips, and the share of each peak rate that a chip sustains. Estimates use both.

`mxcompile.offline.rates` defines the kinds of rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Share of a peak rate that a chip sustains: lowest, expected, highest. source: origin of the figures."""

    low: float
    centre: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The vendor's data sheet of one chip; rates are for dense products.

    dense_tflops: 10¹² operations a second by kind: "bf16", "fp32" (not TF32), "mxfp8" (a scale per block of
    32), "fp8" (a scale per tensor or channel), "fp4" (packed). FP8 and FP4 default to MXFP8's rate, MXFP8 to
    BF16's. bandwidth_gbs: bandwidth of device memory, 10⁹ bytes a second. memory_gb: device memory, 10⁹
    bytes. clock_ghz: clock that these rates assume, 10⁹ cycles a second. rates: sustained shares that
    replace the target's.
    """

    chip: str
    dense_tflops: Mapping[str, float] = field(hash=False)
    _: KW_ONLY
    bandwidth_gbs: float
    memory_gb: float
    clock_ghz: float
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    def tflops(self, product: str) -> float:
        """Returns the rate of products of a kind in `mxcompile.offline.rates`; attention has BF16's."""
        kind = product.removeprefix("own_").partition("_")[0]
        others = ("mxfp8", "bf16") if kind in ("fp8", "fp4") else ("bf16",)
        return next(self.dense_tflops[name] for name in (kind, *others) if name in self.dense_tflops)


def shares(source: str, **ends: tuple[float, float, float]) -> dict[str, Rate]:
    """Returns a `Rate` for each kind in `ends`, from (low, centre, high); all rates have one `source`."""
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }
