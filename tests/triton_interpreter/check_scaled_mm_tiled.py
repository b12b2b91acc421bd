"""The scaled matmul on tiled scales against FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from operands import assert_within, operand

from mxcompile.formats import E5M2, Format, ScaleLayout
from mxcompile.lowering.kernels.configs import tiled_configs
from mxcompile.lowering.kernels.quantize import Layout, quantize
from mxcompile.lowering.kernels.scaled_mm import Operand
from mxcompile.lowering.kernels.scaled_mm_tiled import fits, plan, scaled_mm_tiled
from mxcompile.lowering.reference.scaled_mm_tiled import scaled_mm_tiled as reference
from mxcompile.lowering.targets import TARGETS

SM_100 = TARGETS["sm_100"]


@pytest.mark.parametrize("majorness", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("choice", range(len(tiled_configs(SM_100))))
def test_configs(majorness, choice):
    a, b = (
        operand(256, 384, k_major=majorness[0], tiled=True),
        operand(384, 384, k_major=majorness[1], tiled=True),
    )
    bias = torch.randn(384).to(torch.bfloat16)
    launch, out = plan(a, b, bias, torch.bfloat16, SM_100, choice)
    launch.run()
    assert_within(out, *reference(a.qdata, a.scale, b.qdata, b.scale, bias), 384)


@pytest.mark.parametrize("shape", [(16, 8, 16), (150, 264, 96), (129, 520, 400), (1, 16, 288)], ids=str)
def test_tails(shape):
    m, n, k = shape
    a, b = operand(m, k, tiled=True), operand(n, k, E5M2, tiled=True)
    assert fits(a, b, torch.float32)
    out = scaled_mm_tiled(a, b, None, torch.float32, SM_100)
    assert_within(out, *reference(a.qdata, a.scale, b.qdata, b.scale, None), k)


def test_more_tiles_than_processors():
    """Every program of the persistent grid takes its second tile."""
    a, b = operand(300, 32, tiled=True), operand(600, 32, tiled=True)
    launch, out = plan(a, b, None, torch.float32, replace(SM_100, processors=4))
    assert launch.grid == (4,)
    launch.run()
    assert_within(out, *reference(a.qdata, a.scale, b.qdata, b.scale, None), 32)


def test_after_the_cast():
    """wgrad from the columnwise copies as the quantizer writes them: dyᵀ · x, both MN-major."""
    dy, x = torch.randn(160, 48).to(torch.bfloat16), torch.randn(160, 80).to(torch.bfloat16)
    operands = []
    for source in (dy, x):
        (copy,) = quantize(source, Layout.COLUMNWISE, Format(), ScaleLayout.TILED_128X4, SM_100)
        operands.append(Operand(qdata=copy.qdata.t(), scale=copy.scale))
    a, b = operands
    assert fits(a, b, torch.float32)
    out = scaled_mm_tiled(a, b, None, torch.float32, SM_100)
    assert_within(out, *reference(a.qdata, a.scale, b.qdata, b.scale, None), 160)
    error = (out.double() - dy.double().t() @ x.double()).norm() / out.double().norm()
    assert error < 10 ** (-27.5 / 20)


def test_what_does_not_fit():
    good = operand(32, 64, tiled=True)
    assert not fits(operand(32, 64), good, torch.bfloat16)  # row-major scales
    assert not fits(operand(32, 60, tiled=True), operand(32, 60, tiled=True), torch.bfloat16)
    assert not fits(good, operand(30, 64, tiled=True), torch.bfloat16)  # rows of the result: 60 bytes
    assert not fits(operand(0, 64, tiled=True), good, torch.bfloat16)
    assert fits(good, good, torch.bfloat16)
