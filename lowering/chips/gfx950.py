"""MI350: MX products, and packed FP4 products with E8M0 scales."""

from __future__ import annotations

from dataclasses import replace

from mxcompile.formats import ScaleType
from mxcompile.lowering.chips.target import MAMF, UNKNOWN, Peak, amd, shares
from mxcompile.lowering.chips.tiles import FUSED_FEW, MX_TILES, WEIGHT_ONLY_AMD, MatmulConfig, ScaledChoices

_TILES = replace(
    MX_TILES,
    scaled_mm=ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=2),
        few=MatmulConfig(block_m=16, block_n=128, block_k=256, num_warps=4, num_stages=2),
        few_rows=32,
        swap_few=False,
    ),
    fused_quantize_mm=ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=2),
        few=MatmulConfig(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=2),
        few_rows=32,
        swap_few=False,
    ),
    weight_only_mm=WEIGHT_ONLY_AMD,
    more_scaled_mm=(
        MatmulConfig(block_m=256, block_n=128, block_k=128, num_warps=8, num_stages=2),
        MatmulConfig(block_m=128, block_n=64, block_k=256, num_warps=8, num_stages=2),
    ),
    more_fused_few=(FUSED_FEW,),
)

TARGETS = (
    amd(
        "gfx950",
        "MI350",
        processors=256,
        shared_kib=160,
        mma="v_mfma_scale",
        fp4_scales=frozenset({ScaleType.E8M0}),
        encodes_fp8=True,
        decodes_fp8=True,
        tiles=_TILES,
        peak=Peak(
            "MI355X",
            {"bf16": 2516, "fp32": 157.3, "mxfp8": 5033, "fp4": 10066},
            bandwidth_gbs=8000,
            memory_gb=288,
            clock_ghz=2.4,
        ),
        peaks=dict.fromkeys(("mi350", "mi350x", "mi355x")),
        rates={
            **shares("torchao #4290: casts 4.4 to 4.5 TB/s", memory=(0.54, 0.58, 0.64)),
            **shares(f"{MAMF}: 1,565 TFLOPS at the best shape", bf16=(0.50, 0.56, 0.62)),
            **shares(
                "pytorch #193527: FlyDSL 2,336 TFLOPS at 8192³, 0.47; Triton's own assumed to be slower",
                own_mxfp8=(0.34, 0.40, 0.47),
                mxfp8=(0.38, 0.44, 0.50),
            ),
            **shares(
                "MSLK #379: dot_scaled of MXFP4 3,300 TFLOPS on a MI350X, 0.36 of its data sheet",
                own_fp4=(0.28, 0.34, 0.42),
            ),
            **shares(UNKNOWN, fp8_tensor=(0.36, 0.44, 0.54), fp8_channel=(0.32, 0.40, 0.50)),
            **shares(UNKNOWN, flash=(0.22, 0.30, 0.42), flash_backward=(0.14, 0.22, 0.32)),
        },
    ),
)
