"""The scaled matmul kernels against FP64."""

from __future__ import annotations

import pytest
import torch
from operands import assert_within, operand

from mxcompile.errors import TargetError
from mxcompile.formats import E4M3, E5M2
from mxcompile.lowering.kernels.scaled_mm import Operand, plan, scaled_mm
from mxcompile.lowering.reference.scaled_mm import scaled_mm as reference
from mxcompile.lowering.targets import TARGETS

NATIVE = [name for name, target in TARGETS.items() if target.native]
MAJORNESS = [(True, True), (True, False), (False, False), (False, True)]


def check(a: Operand, b: Operand, bias, out_dtype, target: str) -> None:
    out = scaled_mm(a, b, bias, out_dtype, TARGETS[target])
    exact, magnitude = reference(a.qdata, a.scale, b.qdata, b.scale, bias)
    assert out.dtype is out_dtype
    assert_within(out, exact, magnitude, a.qdata.shape[1])


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("majorness", MAJORNESS, ids=str)
def test_majorness(majorness, target):
    a, b = operand(160, 256, k_major=majorness[0]), operand(144, 256, k_major=majorness[1])
    check(a, b, None, torch.float32, target)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 130, 96), (70, 33, 1000), (131, 129, 40), (300, 20, 288)], ids=str
)
def test_shapes(shape, tiled, target):
    m, n, k = shape
    a, b = operand(m, k, tiled=tiled), operand(n, k, tiled=tiled)
    check(a, b, torch.randn(n).to(torch.bfloat16), torch.bfloat16, target)


@pytest.mark.parametrize("elem_a", [E4M3, E5M2], ids=lambda elem: elem.name)
@pytest.mark.parametrize("elem_b", [E4M3, E5M2], ids=lambda elem: elem.name)
@pytest.mark.parametrize("m", [16, 130])
def test_formats(m, elem_a, elem_b):
    check(operand(m, 128, elem_a), operand(96, 128, elem_b), torch.randn(96), torch.float32, "sm_100")


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("m", [7, 200])
def test_nan_reaches_its_row_only(m, target):
    a, b = operand(m, 96), operand(64, 96)
    a.scale[3, 1], b.scale[50, 2] = 255, 255
    out = scaled_mm(a, b, None, torch.bfloat16, TARGETS[target])
    wanted = torch.zeros(m, 64, dtype=torch.bool)
    wanted[3], wanted[:, 50] = True, True
    assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("shape", [(0, 8, 64), (8, 0, 64), (8, 8, 0)], ids=str)
def test_empty(shape):
    m, n, k = shape
    bias = torch.randn(n)
    out = scaled_mm(operand(m, k), operand(n, k), bias, torch.float32, TARGETS["sm_100"])
    assert torch.equal(out, bias.expand(m, n) if k == 0 else torch.empty(m, n))


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in NATIVE])
def test_absent_targets_say_why(target):
    with pytest.raises(TargetError, match=rf"scaled_mm does not run on {target}: \w+"):
        plan(operand(8, 32), operand(8, 32), None, torch.float32, TARGETS[target])
