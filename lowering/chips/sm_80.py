"""A100: no FP8 products; MX products are emulated in BF16."""

from __future__ import annotations

from dataclasses import replace

from mxcompile.lowering.chips.target import MAMF, Peak, nvidia, shares
from mxcompile.lowering.chips.tiles import EMULATED_TILES, Unsupported, weight_only

TARGETS = (
    nvidia(
        80,
        "A100",
        processors=108,
        shared_kib=163,
        tiles=replace(
            EMULATED_TILES,
            fp8_cast=Unsupported(reason="no FP8 GEMM to cast for"),
            weight_only_mm=weight_only(4, 3, 4),  # decoding with integer instructions spills at two warps
        ),
        peak=Peak("A100 80GB", {"bf16": 312, "fp32": 19.5}, bandwidth_gbs=2039, memory_gb=80, clock_ghz=1.41),
        peaks={"a100": None},
        rates={
            **shares("Liger-Kernel's benchmarks, norms of 8,192 columns and more", memory=(0.72, 0.80, 0.84)),
            **shares(
                f"{MAMF}: 0.87 at the best shape; triton #3551: 0.77 to 0.83",
                bf16=(0.74, 0.80, 0.87),
                own_bf16=(0.70, 0.80, 0.88),
            ),
            **shares(
                "FlashAttention-2, arXiv 2307.08691, causal, heads of 128",
                flash=(0.54, 0.60, 0.65),
                flash_backward=(0.44, 0.50, 0.56),
            ),
        },
    ),
)
