"""B200 and B300: MX and packed FP4 products in tensor memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mxcompile.formats import ScaleLayout, ScaleType
from mxcompile.lowering.chips.target import MAMF, Peak, nvidia, shares
from mxcompile.lowering.chips.tiles import MX_TILES, MatmulConfig, ScaledChoices, TiledConfig

# Triton 3.9 needs more tensor memory than the chip has for a warp-specialised tile of 256 columns.
_TILED = (
    TiledConfig(block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=4, halvings=2),
    TiledConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4, halvings=2),
    TiledConfig(
        block_m=128,
        block_n=128,
        block_k=128,
        num_warps=4,
        num_stages=4,
        halvings=1,
        warp_specialize=True,
        since=(3, 7),
    ),
)

_TILES = replace(
    MX_TILES,
    scaled_mm=ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=128, num_warps=4, num_stages=4),
        few=MatmulConfig(block_m=128, block_n=32, block_k=256, num_warps=4, num_stages=3),
        few_rows=64,
        swap_few=True,  # the MMA needs at least 128 rows of A, but only 16 of B
        gathered=MatmulConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3),
    ),
    scaled_mm_tiled=_TILED,
    fused_quantize_mm=ScaledChoices(
        many=MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
        few=MatmulConfig(block_m=128, block_n=32, block_k=128, num_warps=8, num_stages=3),
        few_rows=64,
        swap_few=True,
    ),
    more_scaled_mm=(
        MatmulConfig(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=2),
        MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=4, num_stages=4),
    ),
    more_fused_few=(MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=4),),
    more_fused_many=(MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=3),),
)

_RATES = {
    **shares(
        "casts of torchao 5.9 to 6.5 TB/s, cuDNN's norms 6.0 to 6.5, quack's copy 6.3",
        memory=(0.74, 0.78, 0.81),
    ),
    **shares(f"{MAMF}: 1,745 TFLOPS at the best shape, 0.62 to 0.71 at others", bf16=(0.62, 0.67, 0.73)),
    **shares(
        "cuBLAS, triton #9044 and #9697: 2,850 TFLOPS at 8192³, 2,648 at 16384³, 2,587 at 32768³",
        mxfp8=(0.57, 0.60, 0.64),
    ),
    **shares(
        "cuBLAS on a B200, triton #9697: 5,590 TFLOPS at 8192³, 4,314 at 16384³, 4,933 at 32768³; torchao"
        " #2427: 4,460 at 4096³, 5,370 at 8192³",
        fp4=(0.48, 0.57, 0.63),
    ),
    **shares(
        "triton #9697: Gluon's NVFP4 on one processor 4,782 TFLOPS at 8192³; #9044: dot_scaled 4,200 to"
        " 4,500",
        own_fp4=(0.45, 0.50, 0.55),
    ),
    **shares(
        "triton #9044: dot_scaled of 128×256 2,202 TFLOPS; #9697: Gluon on one processor 2,526",
        own_mxfp8=(0.45, 0.50, 0.58),
        own_bf16=(0.45, 0.55, 0.68),
    ),
    **shares(f"{MAMF}: 3,432 TFLOPS at the best shape", fp8_tensor=(0.58, 0.65, 0.76)),
    **shares("helion #2756: CUTLASS 1,860 TFLOPS at 4096³", fp8_channel=(0.36, 0.41, 0.50)),
    **shares(
        "cudnn-frontend, GB200 with cuDNN 9.22, causal, 8,192 long: 1,574 and 1,332 TFLOPS;"
        " FlashAttention-4 on a B200 1,418 and 1,209",
        cudnn=(0.58, 0.64, 0.70),
        cudnn_backward=(0.50, 0.55, 0.59),
    ),
    **shares(
        "triton-lang/Triton-to-tile-IR: 391 and 313 TFLOPS",
        flash=(0.15, 0.174, 0.20),
        flash_backward=(0.12, 0.139, 0.16),
    ),
}

_BOTH: dict[str, Any] = {
    "shared_kib": 227,
    "mma": "tcgen05.mma block_scale",
    "tmem_columns": 512,
    "scale_layout": ScaleLayout.TILED_128X4,
    "fp4_scales": frozenset({ScaleType.E4M3, ScaleType.E8M0}),
    "library_fp4": frozenset({ScaleType.E4M3, ScaleType.E8M0}),
    # Our NVFP4 kernel takes 2.25 cycles of shared memory per k, but 1.0 cycle of MMA. So it reaches at most
    # 0.44 of the data sheet's rate; the library's kernel reaches 0.57.
    "long_k": 7168,
    "prefers_cudnn": True,
    "tiles": _TILES,
}

TARGETS = (
    nvidia(
        100,
        "B200, GB200",
        processors=148,
        groups_in_library=True,  # the library's machine code seems to be for sm_100 alone
        peak=Peak(
            "B200",
            {"bf16": 2250, "fp32": 75, "mxfp8": 4500, "fp4": 9000},
            bandwidth_gbs=8000,
            memory_gb=180,
            clock_ghz=1.85,
        ),
        peaks=dict.fromkeys(("b200", "gb200")),
        rates=_RATES,
        **_BOTH,
    ),
    nvidia(
        103,
        "B300, GB300",
        processors=160,
        peak=Peak(
            "B300",
            {"bf16": 2250, "fp32": 75, "mxfp8": 4500, "fp4": 13500},
            bandwidth_gbs=8000,
            memory_gb=288,
            clock_ghz=1.72,
        ),
        peaks=dict.fromkeys(("b300", "gb300")),
        rates=_RATES
        | shares(
            "Transformer Engine's GEMM profile of a B300: 5,094 TFLOPS over the products of a layer, by"
            " cuBLAS",
            fp4=(0.33, 0.38, 0.46),
            own_fp4=(0.30, 0.35, 0.40),
        ),
        **_BOTH,
    ),
)
