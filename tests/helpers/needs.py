"""Marks of tests that need what not every PyTorch and Triton has; without it they skip with the reason."""

from __future__ import annotations

import pytest

from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.targets import TARGETS

SPECIALIZED_WARPS = pytest.mark.skipif(
    not any(config.warp_specialize for config in tiled_configs(TARGETS["sm_100"])),
    reason="this Triton does not compile specialised warps",
)
