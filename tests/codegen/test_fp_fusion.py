"""Kernels state whether a · b + c is one operation; compiling them does not depend on Triton's default."""

from __future__ import annotations

import os
import re

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.rendered import rendered
from torch import Tensor
from torch._inductor import config, utils

from mxcompile.lowering.inductor import fp_fusion
from mxcompile.lowering.targets import TARGETS

BF16 = torch.bfloat16


def cast_and_multiply(x: Tensor, w: Tensor) -> list[Tensor]:
    a, b = (quantize(side, -1, torch.float8_e4m3fn, "rceil") for side in (x, w))
    return [scaled_mm(*a, b[0].t(), b[1].t(), None, BF16)]


@pytest.mark.parametrize("emulated", [False, True])
def test_every_kernel_states_fp_fusion(emulated: bool):
    inputs = [torch.empty(256, 256, dtype=BF16, device="meta") for _ in range(2)]
    with config.patch(emulate_precision_casts=emulated):
        source = rendered(cast_and_multiply, inputs, TARGETS["sm_100"])
    kernels = source.count("async_compile.triton(")
    assert kernels == 2  # both casts have the same
    assert re.findall(r"'enable_fp_fusion': (\w+)", source) == [str(not emulated)] * kernels


def test_fp8_types_are_asked_for_with_a_stated_default(monkeypatch):
    """The program's environment is as it was; what it states itself stays."""
    seen = []
    ask = lambda *_: seen.append(os.environ["TRITON_DEFAULT_FP_FUSION"])  # noqa: E731
    monkeypatch.setattr(utils, "is_triton_fp8_dtype_supported", ask, raising=False)
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    fp_fusion.cache_fp8_types()
    assert "TRITON_DEFAULT_FP_FUSION" not in os.environ
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    fp_fusion.cache_fp8_types()
    assert seen == ["1", os.environ["TRITON_DEFAULT_FP_FUSION"]] == ["1", "0"]
