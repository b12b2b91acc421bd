"""The fused quantize + matmul kernel against FP64 products of the reference cast."""

from __future__ import annotations

import pytest
import torch
from operands import assert_within, embedded, operand

from mxcompile.formats import E4M3, E5M2, Format, Rounding
from mxcompile.lowering.kernels.fused_quantize_mm import fused_quantize_mm
from mxcompile.lowering.reference.fused_quantize_mm import fused_quantize_mm as reference
from mxcompile.lowering.targets import TARGETS

NATIVE = [name for name, target in TARGETS.items() if target.native]


def activation(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many binades from block to block, in memory that is NaN beyond them."""
    exponents = torch.randint(-30, 30, (m, -(-k // 32))).repeat_interleave(32, 1)[:, :k]
    return embedded((torch.randn(m, k) * torch.exp2(exponents.float())).to(dtype), float("nan"))


def check(x, w, bias, fmt, out_dtype, target) -> None:
    out = fused_quantize_mm(x, w, bias, fmt, out_dtype, TARGETS[target])
    assert_within(out, *reference(x, w.qdata, w.scale, bias, fmt), x.shape[1])


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 130, 96), (40, 70, 288), (150, 140, 250)], ids=str)
def test_shapes(shape, tiled, target):
    m, n, k = shape
    w = operand(n, k, spread=20, tiled=tiled)
    check(activation(m, k), w, torch.randn(n).to(torch.bfloat16), Format(), torch.bfloat16, target)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=lambda elem: elem.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formats(dtype, elem, rounding):
    w = operand(40, 128, spread=20)
    check(activation(20, 128, dtype), w, None, Format(elem=elem, rounding=rounding), torch.float32, "sm_100")


@pytest.mark.parametrize("m", [20, 130])
def test_strides(m):
    x, w = activation(256, m).t(), operand(40, 256, spread=20, k_major=False)
    check(x, w, None, Format(), torch.float32, "sm_100")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m", [20, 130])
def test_nan_and_inf_reach_their_row_only(m, bad):
    x, w = activation(m, 96), operand(40, 96, spread=20)
    x[5, 70] = bad
    out = fused_quantize_mm(x, w, None, Format(), torch.bfloat16, TARGETS["sm_100"])
    assert out[5].isnan().all()
    assert out.isnan().sum() == 40


@pytest.mark.parametrize("shape", [(0, 8, 64), (8, 0, 64), (8, 8, 0)], ids=str)
def test_empty(shape):
    m, n, k = shape
    out = fused_quantize_mm(
        torch.empty(m, k), operand(n, k), None, Format(), torch.float32, TARGETS["sm_100"]
    )
    assert torch.equal(out, torch.zeros(m, n))
