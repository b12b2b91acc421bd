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

    FP8 and FP4 default to MXFP8's rate, MXFP8 to BF16's.

    bf16_tflops, fp32_tflops (not TF32), mxfp8_tflops (a scale per block of 32), fp8_tflops (a scale per
    tensor or channel), fp4_tflops (packed FP4): 10¹² operations a second. bandwidth_gbs: bandwidth of device
    memory, 10⁹ bytes a second. memory_gb: device memory, 10⁹ bytes. clock_ghz: clock that these rates
    assume, 10⁹ cycles a second. rates: sustained shares that replace the target's.
    """

    chip: str
    _: KW_ONLY
    bf16_tflops: float
    fp32_tflops: float
    bandwidth_gbs: float
    memory_gb: float
    clock_ghz: float
    mxfp8_tflops: float = 0.0
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        mxfp8 = self.mxfp8_tflops or self.bf16_tflops
        rates = {"mxfp8": mxfp8, "fp8": self.fp8_tflops or mxfp8, "fp4": self.fp4_tflops or mxfp8}
        for kind, tflops in rates.items():
            object.__setattr__(self, f"{kind}_tflops", tflops)  # the class is frozen

    def tflops(self, product: str) -> float:
        """Returns the rate of products of a kind in `mxcompile.offline.rates`; attention has BF16's."""
        kind = product.removeprefix("own_").partition("_")[0]
        tflops: float = getattr(self, f"{kind}_tflops", self.bf16_tflops)
        return tflops


def shares(source: str, **ends: tuple[float, float, float]) -> dict[str, Rate]:
    """Returns a `Rate` for each kind in `ends`, from (low, centre, high); all rates have one `source`."""
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }
