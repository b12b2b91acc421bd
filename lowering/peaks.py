"""The data sheets of chips: the rates that estimates take shares of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The vendor's data sheet for dense products of one chip of a target.

    chip: which. bf16_tflops, mxfp8_tflops, fp8_tflops, fp4_tflops: 10¹² operations a second; the latter three
    only where they are native, of operands with a scale a block of 32, with one a tensor or channel, and of
    packed FP4. fp32_tflops: of FP32, not TF32.
    bandwidth_gbs: of device memory, 10⁹ bytes a second. memory_gb: of device memory, 10⁹ bytes. clock_ghz: at
    which the rates hold, 10⁹ cycles a second.
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

    def time_us(self, *, flops: float, tflops: float, num_bytes: float) -> float:
        """The least time for so many operations and bytes of memory traffic, overlapped perfectly."""
        return max(flops / (tflops * 1e6), num_bytes / (self.bandwidth_gbs * 1e3))


def _peak(
    chip: str,
    bf16_tflops: float,
    fp32_tflops: float,
    bandwidth_gbs: float,
    memory_gb: float,
    clock_ghz: float,
    mxfp8_tflops: float = 0.0,
    fp8_tflops: float = 0.0,
    fp4_tflops: float = 0.0,
) -> Peak:
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
    )


PEAKS = {
    "a100": _peak("A100 80GB", 312, 19.5, 2039, 80, 1.41),
    "l40s": _peak("L40S", 362, 91.6, 864, 48, 2.49, fp8_tflops=733),
    "h100": _peak("H100", 989, 67, 3350, 80, 1.83, fp8_tflops=1979),
    "h200": _peak("H200", 989, 67, 4800, 141, 1.83, fp8_tflops=1979),
    "b200": _peak("B200", 2250, 75, 8000, 180, 1.85, 4500, fp4_tflops=9000),
    "b300": _peak("B300", 2250, 75, 8000, 288, 1.72, 4500, fp4_tflops=13500),
    "rtx5090": _peak("RTX 5090", 209.5, 104.8, 1792, 32, 2.41, 838, fp8_tflops=419, fp4_tflops=1676),
    "mi300x": _peak("MI300X", 1307, 163.4, 5300, 192, 2.1, fp8_tflops=2615),
    "mi355x": _peak("MI355X", 2516, 157.3, 8000, 288, 2.4, 5033, fp4_tflops=10066),
}
"""By what chips are called in `targets.CHIPS`; others there have the peaks of their target's row."""
