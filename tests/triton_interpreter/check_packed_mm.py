"""The generated products of packed FP4 operands against FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.operands import assert_within, product
from helpers.packed_operands import MXFP4, NAN, NVFP4, PackedOperand, packed_operand, tensors
from modules import results_of_calls
from torch import Tensor

from mxcompile import ops
from mxcompile.lowering.choices import configs
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import scaled_mm_tiled, vendor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CHIPS = [
    (target, word)
    for target in ("sm_100", "sm_120", "gfx950")
    for word in (MXFP4, NVFP4)
    if (target, word) != ("gfx950", NVFP4)
]


def words(form: str) -> tuple[str, str]:
    """The formats of both packed operands."""
    return f"{form} packed", f"{form} packed"


Call = tuple[PackedOperand, PackedOperand, Tensor | None]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """No library's product."""
    monkeypatch.setattr(vendor, "choice", lambda *_, **__: None)


def check(calls: list[Call], word: str, dtype: torch.dtype, target) -> None:
    """Each product within the bound of FP32 accumulation."""
    arguments = [(*a.left, *b.right, bias, dtype, *words(word), tensors(a, b)) for a, b, bias in calls]
    for out, (a, b, bias) in zip(results_of_calls(ops.matmul, arguments, target=target), calls, strict=True):
        assert out.dtype is dtype
        # the scales of both tensors are multiplied in FP32, and then what is accumulated
        assert_within(out, *product(a.values, b.values, bias), a.values.shape[1] + 4)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("target", "word"), CHIPS)
def test_packed_mm_of_odd_shapes_matches_fp64(target, word, tiled, dtype, monkeypatch):
    """Odd and short K, few rows, tails of every tile, a bias of another dtype; whole steps and tiles."""
    monkeypatch.setattr(scaled_mm_tiled, "fits", lambda _: False)
    shapes = [(1, 2, 3), (5, 130, 96), (70, 33, 1001), (131, 129, 40), (300, 20, 288), (128, 256, 512)]
    sides = [
        (packed_operand(m, k, word, tiled=tiled), packed_operand(n, k, word, tiled=tiled))
        for m, n, k in shapes
    ]
    check([(*side, torch.randn(side[1].codes.shape[0])) for side in sides], word, dtype, target)


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
def test_packed_mm_with_tiled_scales_on_one_side_matches_fp64(word):
    """As where a weight is stored, whose scales lie in rows."""
    calls = [
        (packed_operand(m, 416, word, tiled=True), packed_operand(272, 416, word), None) for m in (16, 300)
    ]
    check(calls, word, BF16, "sm_100")


def test_packed_mm_with_fp16_result_matches_fp64():
    calls = [
        (packed_operand(m, 130, MXFP4, spread=2), packed_operand(70, 130, MXFP4, spread=2), None)
        for m in (9, 99)
    ]
    check(calls, MXFP4, F16, "sm_120")


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
@pytest.mark.parametrize(
    "config", tiled_configs(TARGETS["sm_100"]), ids=lambda c: f"{c.block_n}{'ws' * c.warp_specialize}"
)
def test_packed_mm_through_the_accelerator_matches_fp64(config, word, monkeypatch):
    """Every configuration: several steps of K, tails, and second tiles of a program."""
    monkeypatch.setattr(configs, "tiled_products", lambda *_: [config])
    shapes = [(256, 384, 768), (150, 264, 96), (129, 520, 800), (300, 600, 64)]
    calls = [
        (
            packed_operand(m, k, word, tiled=True),
            packed_operand(n, k, word, tiled=True),
            torch.randn(n).to(BF16),
        )
        for m, n, k in shapes
    ]
    check(calls, word, BF16, replace(TARGETS["sm_100"], processors=4))


@pytest.mark.parametrize(("target", "word"), CHIPS)
def test_nan_reaches_its_row_only(target, word):
    calls = [(packed_operand(m, 96, word), packed_operand(64, 96, word), None) for m in (7, 200)]
    for a, b, _ in calls:
        a.scale[3, 1], b.scale[50, 2] = NAN[word], NAN[word]
    arguments = [(*a.left, *b.right, None, BF16, *words(word), tensors(a, b)) for a, b, _ in calls]
    for out in results_of_calls(ops.matmul, arguments, target=target):
        wanted = torch.zeros(out.shape, dtype=torch.bool)
        wanted[3], wanted[:, 50] = True, True
        assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_a_scale_for_every_column(target):
    """As a weight has that was joined of several."""
    m, n, k = 40, 70, 96
    a, b = packed_operand(m, k, NVFP4), packed_operand(n, k, NVFP4)
    several = torch.exp2(torch.randn(1, n) * 3)
    arguments = [(*a.left, *b.right, None, F32, *words(NVFP4), [a.tensor, several])]
    (out,) = results_of_calls(ops.matmul, arguments, target=target)
    assert b.tensor is not None
    exact = b.values / b.tensor.double() * several.double().t()
    assert_within(out, *product(a.values, exact), k + 4)
