"""The weight-only matmul kernels against FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operands import assert_within, embedded, operand

from mxcompile.formats import E5M2
from mxcompile.lowering.kernels.weight_only_mm import plan, weight_only_mm
from mxcompile.lowering.reference.weight_only_mm import weight_only_mm as reference
from mxcompile.lowering.targets import TARGETS

SMALL = {name: replace(TARGETS[name], processors=4) for name in ("sm_80", "sm_90")}
"""A chip that encodes and decodes FP8 itself and one that does not, with few multiprocessors: no split."""


def activation(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return embedded(
        torch.randn(m, k).mul(torch.exp2(torch.randint(-8, 8, (m, k)).float())).to(dtype), float("nan")
    )


def check(x, w, bias, out_dtype, target) -> None:
    out = weight_only_mm(x, w, bias, out_dtype, target)
    assert_within(out, *reference(x, w.qdata, w.scale, bias), x.shape[1])


@pytest.mark.parametrize("target", SMALL)
@pytest.mark.parametrize(
    "shape", [(1, 200, 1056), (2, 130, 300), (3, 70, 96), (20, 130, 260), (5, 1, 1)], ids=str
)
def test_shapes(shape, target):
    m, n, k = shape
    bias = torch.randn(n).to(torch.bfloat16)
    check(activation(m, k), operand(n, k), bias, torch.bfloat16, SMALL[target])


@pytest.mark.parametrize("m", [1, 17])
def test_split_k(m):
    x, w, bias = activation(m, 4100), operand(24, 4100), torch.randn(24)
    launches, out = plan(x, w, bias, torch.bfloat16, TARGETS["sm_90"])
    assert launches[0].grid[2] > 1
    for launch in launches:
        launch.run()
    assert_within(out, *reference(x, w.qdata, w.scale, bias), 4100)


@pytest.mark.parametrize("m", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_activations(dtype, m):
    check(activation(m, 200, dtype), operand(40, 200, E5M2), None, torch.float32, SMALL["sm_90"])


def test_scales_at_both_ends():
    """In FP32 every weight is exact, also with the smallest scale and the largest of a finite value."""
    w = operand(16, 64)
    w.scale[:8], w.scale[8:] = 0, 246
    x = activation(1, 64) * 2.0**-30
    check(x, w, None, torch.float32, SMALL["sm_90"])


@pytest.mark.parametrize("m", [2, 16])
def test_weight_strides(m):
    check(activation(m, 160), operand(70, 160, k_major=False), None, torch.float32, SMALL["sm_90"])


@pytest.mark.parametrize("m", [2, 16])
def test_nan_scale_and_inf_activation(m):
    x, w = activation(m, 64), operand(32, 64)
    w.scale[4, 1] = 255
    x[1, 3] = float("nan")
    out = weight_only_mm(x, w, None, torch.bfloat16, SMALL["sm_90"])
    wanted = torch.zeros(m, 32, dtype=torch.bool)
    wanted[1], wanted[:, 4] = True, True
    assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("shape", [(0, 8, 64), (8, 0, 64), (8, 8, 0), (1, 8, 0)], ids=str)
def test_empty(shape):
    m, n, k = shape
    out = weight_only_mm(torch.empty(m, k), operand(n, k), None, torch.float32, TARGETS["sm_90"])
    assert torch.equal(out, torch.zeros(m, n))


@pytest.mark.parametrize("m", [1, 3])
def test_rows_more_than_two_gigabytes_apart(m):
    """Offsets into a weight are 64 bits wide. Only the pages that are written take memory."""
    n, k, apart = 3, 64, 2**30 + 64
    memory = torch.empty(n * apart, dtype=torch.uint8)
    w = operand(n, k)
    far = memory.as_strided((n, k), (apart, 1))
    far.copy_(w.qdata.view(torch.uint8))
    w = replace(w, qdata=far.view(w.qdata.dtype))
    check(activation(m, k), w, None, torch.bfloat16, SMALL["sm_90"])
