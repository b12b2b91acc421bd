"""Data sheets of chips, and the share of each peak rate that a chip sustains. Estimates use both.

`mxcompile.offline.rates` defines the kinds of rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Share of a peak rate that a chip sustains: lowest, expected, highest. source: origin of the figures."""

    low: float
    centre: float
    high: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The vendor's data sheet of one chip; rates are for dense products.

    bf16_tflops, fp32_tflops (not TF32), mxfp8_tflops (a scale per block of 32), fp8_tflops (a scale per
    tensor or channel), fp4_tflops (packed FP4): 10¹² operations a second. bandwidth_gbs: bandwidth of device
    memory, 10⁹ bytes a second. memory_gb: device memory, 10⁹ bytes. clock_ghz: clock that these rates
    assume, 10⁹ cycles a second. rates: sustained shares that replace the target's.
    """

    chip: str
    bf16_tflops: float
    mxfp8_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    fp32_tflops: float
    bandwidth_gbs: float
    memory_gb: float
    clock_ghz: float
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)


def peak(
    chip: str,
    *,
    bf16_tflops: float,
    fp32_tflops: float,
    bandwidth_gbs: float,
    memory_gb: float,
    clock_ghz: float,
    mxfp8_tflops: float = 0.0,
    fp8_tflops: float = 0.0,
    fp4_tflops: float = 0.0,
    rates: Mapping[str, Rate] | None = None,
) -> Peak:
    """Returns the data sheet of `chip`. FP8 and FP4 default to MXFP8's rate, MXFP8 to BF16's."""
    return Peak(
        chip=chip,
        bf16_tflops=bf16_tflops,
        fp32_tflops=fp32_tflops,
        mxfp8_tflops=mxfp8_tflops or bf16_tflops,
        fp8_tflops=fp8_tflops or mxfp8_tflops or bf16_tflops,
        fp4_tflops=fp4_tflops or mxfp8_tflops or bf16_tflops,
        bandwidth_gbs=bandwidth_gbs,
        memory_gb=memory_gb,
        clock_ghz=clock_ghz,
        rates=rates or {},
    )


def shares(source: str, **ends: tuple[float, float, float]) -> dict[str, Rate]:
    """Returns a `Rate` for each kind in `ends`, from (low, centre, high); all rates have one `source`."""
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }
