"""The generated products of MX operands against FP64: the form that loads through pointers."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import scaled_mm
from helpers.operands import Operand, assert_within, operand, product
from modules import results_of_calls

from mxcompile.formats import E4M3, E5M2
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import scaled_mm_tiled

NATIVE = [name for name, target in TARGETS.items() if target.native and name != "sm_103"]  # as sm_100
MAJORNESS = [(True, True), (True, False), (False, False), (False, True)]
BF16, F32 = torch.bfloat16, torch.float32
Call = tuple[Operand, Operand, torch.Tensor | None]


def products(calls: list[Call], out_dtype: torch.dtype, target: str) -> list[torch.Tensor]:
    arguments = [(*a.left, *b.right, bias, out_dtype) for a, b, bias in calls]
    outputs: list[torch.Tensor] = results_of_calls(scaled_mm, arguments, target=target)
    return outputs


def check(calls: list[Call], out_dtype: torch.dtype, target: str) -> None:
    for out, (a, b, bias) in zip(products(calls, out_dtype, target), calls, strict=True):
        assert out.dtype is out_dtype
        assert_within(out, *product(a.values, b.values, bias), a.qdata.shape[1])


@pytest.mark.parametrize("target", NATIVE)
def test_scaled_mm_of_every_majorness_matches_fp64(target):
    sides = [(operand(160, 256, k_major=a), operand(144, 256, k_major=b)) for a, b in MAJORNESS]
    check([(*side, None) for side in sides], F32, target)


def test_scaled_mm_with_tiled_scales_as_words_matches_fp64():
    """Whole tiles, whose loads have no masks, two steps of K to a word."""
    sides = [
        (operand(128, 256, k_major=a, tiled=True), operand(256, 256, k_major=b, tiled=True))
        for a, b in MAJORNESS
    ]
    check([(*side, None) for side in sides], F32, "sm_120")


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("tiled", [False, True])
def test_scaled_mm_of_odd_shapes_matches_fp64(tiled, target, monkeypatch):
    monkeypatch.setattr(scaled_mm_tiled, "fits", lambda _: False)
    shapes = [(1, 2, 1), (5, 130, 96), (70, 33, 1000), (131, 129, 40), (300, 20, 288)]
    sides = [(operand(m, k, tiled=tiled), operand(n, k, tiled=tiled)) for m, n, k in shapes]
    check([(*side, torch.randn(side[1].qdata.shape[0]).to(BF16)) for side in sides], BF16, target)


def test_scaled_mm_of_every_format_pair_matches_fp64():
    pairs = [(a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    sides = [(operand(m, 128, a), operand(96, 128, b), torch.randn(96)) for m in (16, 130) for a, b in pairs]
    check(sides, F32, "sm_100")


@pytest.mark.parametrize("target", NATIVE)
def test_nan_reaches_its_row_only(target):
    sides = [(operand(m, 96), operand(64, 96), None) for m in (7, 200)]
    for a, b, _ in sides:
        a.scale[3, 1], b.scale[50, 2] = 255, 255
    for out in products(sides, BF16, target):
        wanted = torch.zeros(out.shape, dtype=torch.bool)
        wanted[3], wanted[:, 50] = True, True
        assert torch.equal(out.isnan(), wanted)


def test_offsets_beyond_32_bits():
    """Rows of a 2^30 bytes apart. Only the pages that are written take memory."""
    m, k, apart = 3, 64, (1 << 30) + 64
    a, b = operand(m, k), operand(40, k)
    far = torch.empty(m * apart, dtype=torch.uint8).as_strided((m, k), (apart, 1))
    far.copy_(a.qdata.view(torch.uint8))
    check([(Operand(qdata=far.view(a.qdata.dtype), scale=a.scale), b, None)], F32, "sm_100")
