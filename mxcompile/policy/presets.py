"""The presets. They decide by role and do not quantize weights with a side shorter than a scale block."""

from __future__ import annotations

from mxcompile.formats import E5M2, PRECISIONS, Choices, ElemRounding, Rounding, Tile, hadamard
from mxcompile.policy.model import Gemm, Preset

_MXFP8, _FP8 = PRECISIONS["mxfp8"], PRECISIONS["fp8"]

PRESETS = {
    preset.name: preset
    for preset in (
        # arXiv 2506.08027: E4M3 for all three tensors, scales rounded up
        Preset(name="nvidia", precision=_MXFP8),
        # OCP MX v1.0 §6.3
        Preset(name="ocp", precision=_MXFP8, formats=Choices(rounding=Rounding.FLOOR)),
        # E4M3 forward, E5M2 gradients, as in FP8 recipes with per-tensor scales
        Preset(name="hybrid", precision=_MXFP8, formats=Choices(grad_dtype=E5M2)),
        # one FP32 scale per tensor, E4M3 forward, E5M2 gradients: Transformer Engine's Float8CurrentScaling
        Preset(name="fp8_tensor", precision=_FP8, formats=Choices(grad_dtype=E5M2)),
        # one FP32 scale per row of each GEMM's operands: torchao's rowwise recipes
        Preset(name="fp8_rowwise", precision=_FP8, formats=Choices(scaling="channel")),
        Preset(
            name="fp8_rowwise_wgrad_bf16",
            precision=_FP8,
            gemms=frozenset({Gemm.FPROP, Gemm.DGRAD}),
            formats=Choices(scaling="channel"),
        ),
        # 1×128 for activations and gradients, 128×128 for weights: DeepSeek-V3, arXiv 2412.19437 §3.3
        Preset(name="fp8_block", precision=_FP8, formats=Choices(scaling="block")),
        # scales from a history of amax, E5M2 gradients: Transformer Engine's DelayedScaling
        Preset(name="fp8_delayed", precision=_FP8, formats=Choices(scaling="delayed", grad_dtype=E5M2)),
        # OCP MX v1.0's integers
        Preset(name="mxint8", precision=PRECISIONS["mxint8"]),
        # 16×16 tiles of weights, wgrad's operands transformed, gradients rounded at random: arXiv 2509.25149
        Preset(
            name="nvfp4",
            precision=PRECISIONS["nvfp4"],
            formats=Choices(
                weight_block=Tile(16, 16), grad_rounding=ElemRounding.STOCHASTIC, hadamard=hadamard.SIGNS
            ),
        ),
        Preset(name="inference", precision=_MXFP8, gemms=frozenset({Gemm.FPROP})),
        Preset(name="bf16", precision=_MXFP8, gemms=frozenset()),
    )
}
"""The presets by name."""

DEFAULT = "nvidia"
