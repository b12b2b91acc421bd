"""RTX 50: MX and packed FP4 products in registers."""

from __future__ import annotations

from dataclasses import replace

from mxcompile.formats import ScaleLayout, ScaleType
from mxcompile.lowering.chips.target import Peak, nvidia, shares
from mxcompile.lowering.chips.tiles import (
    FUSED_FEW,
    MX_TILES,
    QUANTIZE,
    MatmulConfig,
    ScaledChoices,
    TileConfig,
)

_TILES = replace(
    MX_TILES,
    quantize=replace(QUANTIZE, both=TileConfig(block_m=32, block_n=256, num_warps=4)),
    scaled_mm=ScaledChoices(
        # addresses of MN-major operands, read byte by byte, need the registers that block_k=128 would take
        many=MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
        # a fourth stage spills with Triton 3.8
        few=MatmulConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
        few_rows=32,
        swap_few=False,
        gathered=MatmulConfig(block_m=64, block_n=64, block_k=64, num_warps=8, num_stages=3),
    ),
    fused_quantize_mm=ScaledChoices(
        many=MatmulConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=3),
        few=MatmulConfig(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3),
        few_rows=32,
        swap_few=False,
    ),
    more_scaled_mm=(
        MatmulConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=3),
        MatmulConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3),
    ),
    more_fused_few=(FUSED_FEW,),
)

TARGETS = (
    nvidia(
        120,
        "RTX 50",
        processors=170,
        shared_kib=99,
        mma="mma.sync block_scale",
        scale_layout=ScaleLayout.TILED_128X4,
        fp4_scales=frozenset({ScaleType.E4M3, ScaleType.E8M0}),
        library_fp4=frozenset({ScaleType.E4M3}),
        fp8_tiles=frozenset({"tensor"}),  # pytorch #192707: cuBLAS refuses a scale per row
        long_k=4096,  # published shares of the peak: our NVFP4 kernel 0.52, the library's 0.80
        tiles=_TILES,
        peak=Peak(
            "RTX 5090",
            {"bf16": 209.5, "fp32": 104.8, "mxfp8": 838, "fp8": 419, "fp4": 1676},
            bandwidth_gbs=1792,
            memory_gb=32,
            clock_ghz=2.41,
        ),
        peaks={"rtx5090": None},
        rates={
            **shares("quack's benchmark of clusters: 1,477 to 1,577 GB/s", memory=(0.82, 0.85, 0.88)),
            **shares(
                "zzc0721/torch-performance-test-data: 234 to 240 TFLOPS at the boosted clock; some cards 178",
                bf16=(0.95, 1.10, 1.15),
            ),
            **shares(
                "gn-kernels: cuBLAS 660 TFLOPS at 600 W, 532 to 552 at 400 W; quack, blockscaled_api.md: 728"
                " at 8192³",
                mxfp8=(0.64, 0.80, 0.90),
            ),
            **shares(
                "cuBLAS: gn-kernels 1,306 TFLOPS at 600 W, 1,140 to 1,165 at 400 W; quack,"
                " blockscaled_api.md: 1,435 at 8192³; gpu-flops-bench 1,617 at 8192³",
                fp4=(0.66, 0.80, 0.96),
            ),
            **shares(
                "gn-kernels: cuBLAS 480 TFLOPS at 600 W, 448 at 400 W; pytorch #155991: CUTLASS 389",
                fp8_tensor=(0.90, 1.05, 1.16),
            ),
            **shares(
                "vllm #38338: Triton's product of NVFP4 845 to 874 TFLOPS, 0.52 of its peak; MXFP8 assumed"
                " alike",
                own_mxfp8=(0.40, 0.52, 0.70),
            ),
            **shares("vllm #38338: dot_scaled of NVFP4 845 to 874 TFLOPS", own_fp4=(0.45, 0.52, 0.60)),
            **shares(
                "a blog of FlashAttention on an RTX 5090: PyTorch's forward 187 TFLOPS; backward assumed",
                flash=(0.75, 0.85, 0.95),
                flash_backward=(0.45, 0.65, 0.85),
            ),
        },
    ),
)
