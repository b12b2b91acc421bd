"""L40S, L4 and RTX 40: the vendor's library multiplies FP8; MX products are emulated."""

from __future__ import annotations

from mxcompile.lowering.chips.target import Peak, nvidia, shares
from mxcompile.lowering.chips.tiles import EMULATED_TILES

TARGETS = (
    nvidia(
        89,
        "L4, L40S, RTX 40",
        processors=142,
        shared_kib=99,
        tiles=EMULATED_TILES,
        peak=Peak(
            "L40S", {"bf16": 362, "fp32": 91.6, "fp8": 733}, bandwidth_gbs=864, memory_gb=48, clock_ghz=2.49
        ),
        peaks=dict.fromkeys(("l4", "l40", "l40s", "rtx4090")),
        rates=shares(
            "pytorch #192799: 86 TFLOPS forward, 24 to 28 both ways over a mix of shapes",
            flash=(0.24, 0.42, 0.60),
            flash_backward=(0.08, 0.25, 0.45),
        ),
    ),
)
