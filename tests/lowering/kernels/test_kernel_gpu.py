"""The kernels on the GPU of this machine, with its own configs: casts bit for bit, products against FP64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mxcompile.formats import ELEM_TYPES, Format, Rounding, ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.kernels import (
    configs,
    fused_quantize_mm,
    quantize,
    scaled_mm,
    scaled_mm_tiled,
    weight_only_mm,
)
from mxcompile.lowering.kernels.quantize import Layout
from mxcompile.lowering.reference import fused_quantize_mm as fused_reference
from mxcompile.lowering.reference import quantize as quantize_reference
from mxcompile.lowering.reference import scaled_mm as scaled_reference
from mxcompile.lowering.reference import weight_only_mm as weight_only_reference
from mxcompile.lowering.targets import Target

sys.path.append(str(Path(__file__).parents[2] / "triton_interpreter"))
from operands import assert_within, operand

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096, 4096), (16, 1000, 1040), (33, 130, 100), (300, 520, 4096), (2048, 4096, 512)]


@pytest.fixture
def chip():
    """What the device is; tensors are made there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
    torch.set_default_device("cuda")
    yield targets.of_device(torch.device("cuda"))
    torch.set_default_device(None)


def row_or_skip(table, family: str, chip: Target) -> None:
    if isinstance(table.get(chip.name), configs.Absent):
        pytest.skip(f"{family} is not for {chip.name}: {table[chip.name].reason}")


def spread(m: int, n: int) -> torch.Tensor:
    """Normal values whose magnitude changes by many binades from block to block."""
    exponents = torch.randint(-60, 60, (-(-m // 32), -(-n // 32))).to(torch.float32)
    return (
        torch.randn(m, n) * torch.exp2(exponents).repeat_interleave(32, 0)[:m].repeat_interleave(32, 1)[:, :n]
    )


def special(x: torch.Tensor) -> torch.Tensor:
    """`x` with NaN, Inf, negative zeros and subnormals in it."""
    x[0, 0], x[40, 40], x[70, 100] = float("nan"), float("inf"), -float("inf")
    x[32:64, 96:128] = -0.0
    x[96:128, 32:64] *= 2.0**-126
    return x


@pytest.mark.parametrize("scales", ScaleLayout)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 160), (4096, 4096), (333, 1031)], ids=str)
def test_quantize(shape, dtype, layout, scales, chip):
    for elem in ELEM_TYPES.values():
        for rounding in Rounding:
            fmt, x = Format(elem=elem, rounding=rounding), special(spread(*shape)).to(dtype)
            copies = quantize.quantize(x, layout, fmt, scales, chip)
            expected = quantize_reference.quantize(x, fmt, scales)
            wanted = {Layout.ROWWISE: expected[:2], Layout.COLUMNWISE: expected[2:], Layout.BOTH: expected}[
                layout
            ]
            found = [tensor for copy in copies for tensor in (copy.qdata, copy.scale)]
            for tensor, reference in zip(found, wanted, strict=True):
                values, same = (
                    reference.to(torch.float32),
                    tensor.view(torch.uint8) == reference.view(torch.uint8),
                )
                assert torch.equal(tensor.to(torch.float32).isnan(), values.isnan())
                assert (same | values.isnan()).all()


@pytest.mark.parametrize("majorness", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scaled_mm(shape, tiled, majorness, chip):
    row_or_skip(configs.SCALED_MM, "scaled_mm", chip)
    m, n, k = shape
    a, b = operand(m, k, k_major=majorness[0], tiled=tiled), operand(n, k, k_major=majorness[1], tiled=tiled)
    bias = torch.randn(n).to(torch.bfloat16)
    out = scaled_mm.scaled_mm(a, b, bias, torch.bfloat16, chip)
    assert_within(out, *scaled_reference.scaled_mm(a.qdata, a.scale, b.qdata, b.scale, bias), k)


@pytest.mark.parametrize("majorness", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scaled_mm_tiled(shape, majorness, chip):
    row_or_skip(configs.SCALED_MM_TILED, "scaled_mm_tiled", chip)
    m, n, k = shape
    a, b = operand(m, k, k_major=majorness[0], tiled=True), operand(n, k, k_major=majorness[1], tiled=True)
    if not scaled_mm_tiled.fits(a, b, torch.bfloat16):
        pytest.skip("strides the tensor memory accelerator cannot read")
    wanted = scaled_reference.scaled_mm(a.qdata, a.scale, b.qdata, b.scale, None)
    for choice in range(len(configs.tiled_configs(chip))):
        launch, out = scaled_mm_tiled.plan(a, b, None, torch.bfloat16, chip, choice)
        launch.run()
        assert_within(out, *wanted, k)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_quantize_mm(shape, chip):
    row_or_skip(configs.FUSED_QUANTIZE_MM, "fused_quantize_mm", chip)
    m, n, k = shape
    x, w, fmt = spread(m, k).to(torch.bfloat16), operand(n, k, spread=20), Format()
    out = fused_quantize_mm.fused_quantize_mm(x, w, None, fmt, torch.float32, chip)
    assert_within(out, *fused_reference.fused_quantize_mm(x, w.qdata, w.scale, None, fmt), k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weight_only_mm(shape, dtype, chip):
    m, n, k = shape
    x, w = torch.randn(m, k).to(dtype), operand(n, k)
    out = weight_only_mm.weight_only_mm(x, w, torch.randn(n) * 0, torch.float32, chip)
    assert_within(out, *weight_only_reference.weight_only_mm(x, w.qdata, w.scale, None), k)
    again = weight_only_mm.weight_only_mm(x, w, None, torch.float32, chip)
    assert torch.equal(out, again)  # the parts of a split K are summed in one order
