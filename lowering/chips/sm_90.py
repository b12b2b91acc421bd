"""H100 and H200: the vendor's library multiplies FP8, also with block scales; MX products are emulated."""

from __future__ import annotations

from typing import Any

from mxcompile.lowering.chips.target import BLOCKS, FP8_TILES, MAMF, WEIGHTS, Peak, nvidia, shares
from mxcompile.lowering.chips.tiles import EMULATED_TILES


def _peak(chip: str, bandwidth_gbs: float, memory_gb: float, **columns: Any) -> Peak:
    return Peak(
        chip,
        {"bf16": 989, "fp32": 67, "fp8": 1979},
        bandwidth_gbs=bandwidth_gbs,
        memory_gb=memory_gb,
        clock_ghz=1.83,
        **columns,
    )


_H100 = _peak(
    "H100",
    3350,
    80,
    rates=shares(
        "Liger-Kernel's benchmarks of norms and triton #11644: 0.88 to 0.91, more than an H200 reaches",
        memory=(0.80, 0.89, 0.91),
    ),
)

TARGETS = (
    nvidia(
        90,
        "H100, H200",
        processors=132,
        shared_kib=227,
        fp8_tiles=FP8_TILES | {BLOCKS, WEIGHTS},
        prefers_cudnn=True,
        tiles=EMULATED_TILES,
        peak=_peak("H200", 4800, 141),
        peaks={"h100": _H100, "h200": None, "gh200": None},
        rates={
            **shares("cudnn-frontend's benchmarks of norms on an H200", memory=(0.74, 0.80, 0.87)),
            **shares(f"{MAMF}: 794 TFLOPS at the best shape, else 0.70 to 0.76", bf16=(0.70, 0.74, 0.80)),
            **shares(
                f"{MAMF}: 1,453 TFLOPS; Transformer Engine's GEMM profile 0.60 to 0.68",
                fp8_tensor=(0.60, 0.65, 0.73),
            ),
            **shares(
                "torchao: Llama-3 8B on H100 gains 25 % with scales a tensor and 10 % with scales a row",
                fp8_channel=(0.44, 0.53, 0.63),
            ),
            **shares(
                "_scaled_mm of blocks against BF16 on an H100 PCIe 1.34; Transformer Engine's blocks 1.40",
                fp8_block=(0.45, 0.50, 0.56),
            ),
            **shares(
                "cudnn-frontend, H200 with cuDNN 9.19, causal, 8,192 long: 644 and 541 TFLOPS",
                cudnn=(0.60, 0.65, 0.68),
                cudnn_backward=(0.50, 0.547, 0.58),
            ),
            **shares(
                "transformers #48163: cuDNN's is 1.7 to 2.3 times as fast as FlashAttention-2",
                flash=(0.28, 0.33, 0.38),
                flash_backward=(0.24, 0.27, 0.32),
            ),
        },
    ),
)
