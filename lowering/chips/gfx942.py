"""MI300: FP8 products in the FNUZ types; MX products are emulated."""

from __future__ import annotations

from dataclasses import replace

from mxcompile.lowering.chips.target import MAMF, UNKNOWN, Peak, amd, shares
from mxcompile.lowering.chips.tiles import EMULATED_TILES, WEIGHT_ONLY_AMD

TARGETS = (
    amd(
        "gfx942",
        "MI300",
        processors=304,
        shared_kib=64,
        fp8_fnuz=True,
        tiles=replace(EMULATED_TILES, weight_only_mm=WEIGHT_ONLY_AMD),
        peak=Peak(
            "MI300X",
            {"bf16": 1307, "fp32": 163.4, "fp8": 2615},
            bandwidth_gbs=5300,
            memory_gb=192,
            clock_ghz=2.1,
        ),
        peaks=dict.fromkeys(("mi300", "mi300x", "mi325x")),
        rates={
            **shares("aiter #335: norms 3.1 to 3.9 TB/s", memory=(0.58, 0.70, 0.80)),
            **shares(f"{MAMF}: 668 TFLOPS at the best shape; gn-kernels 660", bf16=(0.44, 0.48, 0.52)),
            **shares(
                "gn-kernels: hipBLASLt 1,197 TFLOPS at the best shape; hipBLASLt #1721: 907 at 8192³ at 1"
                " GHz; scales a row assumed to cost 0.02",
                fp8_tensor=(0.36, 0.42, 0.46),
                fp8_channel=(0.34, 0.40, 0.45),
            ),
            **shares(UNKNOWN, flash=(0.24, 0.33, 0.42), flash_backward=(0.16, 0.24, 0.32)),
        },
    ),
)
