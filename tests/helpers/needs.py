"""Marks of tests that skip without what not every PyTorch and Triton has, and a stand-in of another CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.kernel.flex import flex_cpu

from mxcompile.lowering.choices import packing
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.targets import TARGETS

SPECIALIZED_WARPS = pytest.mark.skipif(
    not any(config.warp_specialize for config in tiled_configs(TARGETS["sm_100"])),
    reason="this Triton does not compile specialised warps",
)

ADDED_RESIDUALS = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 12),
    reason="this PyTorch adds no residual in a product on sm_100",
)

PAIRS_OF_BF16 = pytest.mark.skipif(
    not packing.converts(TARGETS["sm_100"]),
    reason="this Triton's assembler does not convert pairs of BF16: the gradients have two kernels",
)

VIEWS_OF_ONE_BUFFER = pytest.mark.skipif(
    not hasattr(flex_cpu, "_realize_duplicate_buffer_inputs"),
    reason="this PyTorch's flex attention on a CPU refuses queries, keys and values that share a buffer",
)


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Until the test ends, the target of this machine's CPU differs by `changes`."""
    monkeypatch.setitem(TARGETS, "cpu", replace(TARGETS["cpu"], **changes))


def skip_without_backward_of_fp32_experts() -> None:
    """Skips a test that trains experts in FP32 if transformers has no operator for their backward."""
    moe = pytest.importorskip("transformers.integrations.moe")
    if not hasattr(moe, "_grouped_mm_fallback_backward_fake"):
        pytest.skip("this transformers has no operator for the backward of experts in FP32")
