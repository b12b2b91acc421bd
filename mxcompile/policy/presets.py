"""The presets. They decide by role; matrices with a side shorter than a block of a scale they leave alone."""

from __future__ import annotations

from mxcompile.formats import E5M2, Rounding
from mxcompile.policy.model import Gemm, Preset

PRESETS = {
    preset.name: preset
    for preset in (
        # arXiv 2506.08027: E4M3 for all three tensors, scales rounded up
        Preset(name="nvidia"),
        # OCP MX v1.0 §6.3
        Preset(name="ocp", rounding=Rounding.FLOOR),
        # E4M3 forward, E5M2 gradients, as in FP8 recipes with per-tensor scales
        Preset(name="hybrid", grad_elem=E5M2),
        Preset(name="inference", gemms=frozenset({Gemm.FPROP})),
        Preset(name="bf16", gemms=frozenset(), roles=frozenset()),
    )
}
"""By name."""

DEFAULT = "nvidia"
