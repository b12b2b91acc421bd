"""The data sheets of chips, and the shares of them that chips sustain: what estimates are made of.

Kinds of rates are those of `mxcompile.offline.rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """low, centre, high: slowest, expected and fastest. source: who measured it, or that it is assumed."""

    low: float
    centre: float
    high: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The vendor's data sheet for dense products of one chip of a target.

    chip: which. bf16_tflops, mxfp8_tflops, fp8_tflops, fp4_tflops: 10¹² operations a second; the latter three
    only where they are native, of operands with a scale a block of 32, with one a tensor or channel, and of
    packed FP4. fp32_tflops: of FP32, not TF32.
    bandwidth_gbs: of device memory, 10⁹ bytes a second. memory_gb: of device memory, 10⁹ bytes. clock_ghz: at
    which the rates hold, 10⁹ cycles a second. rates: sustained rates that differ from the target's.
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

    def time_us(self, *, flops: float, tflops: float, num_bytes: float) -> float:
        """The least time for so many operations and bytes of memory traffic, overlapped perfectly."""
        return max(flops / (tflops * 1e6), num_bytes / (self.bandwidth_gbs * 1e3))


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
    """Returns the data sheet of `chip`. A rate that is left out is that of the next wider elements."""
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
    """Returns rates by kind, each low, centre and high, that have one `source`."""
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }
