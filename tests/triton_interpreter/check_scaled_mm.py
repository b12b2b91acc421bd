"""The generated products of MX and NVFP4 operands against FP64: by pointers, and through the accelerator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.casts import operand_words, quantize, scaled_mm
from helpers.operands import Operand, assert_within, far_apart, operand, product
from helpers.packed_operands import MXFP4, NAN, NVFP4, PackedOperand, packed_operand, tensors
from modules import results_of_calls, run
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import E4M3, E5M2
from mxcompile.lowering.choices import configs
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.lowering.templates import scaled_mm_tiled, vendor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM_100 = TARGETS["sm_100"]
CONFIGS = tiled_configs(SM_100)
MXFP8 = "e4m3 1x32 rceil"
WORDS = [MXFP8, MXFP4, NVFP4]
NATIVE = [name for name, target in TARGETS.items() if target.native and name != "sm_103"]  # as sm_100
CHIPS = [(target, word) for target in NATIVE for word in WORDS if (target, word) != ("gfx950", NVFP4)]
MAJORNESS = [(True, True), (True, False), (False, False), (False, True)]

Side = Operand | PackedOperand
Call = tuple[Side, Side, Tensor | None]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """No library's product."""
    monkeypatch.setattr(vendor, "choice", lambda *_, **__: None)


@pytest.fixture
def by_pointers(monkeypatch):
    """No product through the accelerator."""
    monkeypatch.setattr(scaled_mm_tiled, "fits", lambda _: False)


def side(rows: int, k: int, word: str, **how: Any) -> Side:
    return operand(rows, k, **how) if word == MXFP8 else packed_operand(rows, k, word, **how)


def of_majorness(a: tuple[int, int], b: tuple[int, int], kinds: Any, **how: bool) -> list[Call]:
    """Products of operands of these shapes, K-major or not."""
    return [(operand(*a, k_major=x, **how), operand(*b, k_major=y, **how), None) for x, y in kinds]


def products(calls: list[Call], word: str, dtype: torch.dtype, target: str | Target) -> list[Tensor]:
    arguments = []
    for a, b, bias in calls:
        words, scales = [f"{word} packed"] * 2, None
        if isinstance(a, Operand):
            words = operand_words(a.qdata.dtype, b.qdata.dtype)
        else:
            scales = tensors(a, b)
        arguments.append((*a.left, *b.right, bias, dtype, *words, scales))
    outputs: list[Tensor] = results_of_calls(ops.matmul, arguments, target=target)
    return outputs


def check(calls: list[Call], word: str, dtype: torch.dtype, target: str | Target) -> None:
    """Each product within the bound of FP32 accumulation."""
    # the scales of both tensors are multiplied in FP32, and then what is accumulated
    roundings = 0 if word == MXFP8 else 4
    for out, (a, b, bias) in zip(products(calls, word, dtype, target), calls, strict=True):
        assert out.dtype is dtype
        assert_within(out, *product(a.values, b.values, bias), a.values.shape[1] + roundings)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("target", "word"), CHIPS)
def test_product_of_odd_shapes_matches_fp64(target, word, tiled, dtype, by_pointers):
    """Odd and short K, few rows, tails of every tile, a bias of another dtype; whole steps and tiles."""
    shapes = [(1, 2, 3), (5, 130, 96), (70, 33, 1000), (70, 33, 1001), (131, 129, 40), (300, 20, 288)]
    shapes += [(128, 256, 512), *([(1, 2, 1)] if word == MXFP8 else [])]
    sides = [(side(m, k, word, tiled=tiled), side(n, k, word, tiled=tiled)) for m, n, k in shapes]
    biases = [torch.randn(n).to(BF16 if word == MXFP8 else F32) for _, n, _ in shapes]
    check([(*pair, bias) for pair, bias in zip(sides, biases, strict=True)], word, dtype, target)


@pytest.mark.parametrize("target", NATIVE)
def test_scaled_mm_of_every_majorness_matches_fp64(target):
    check(of_majorness((160, 256), (144, 256), MAJORNESS), MXFP8, F32, target)


def test_scaled_mm_with_tiled_scales_as_words_matches_fp64():
    """Whole tiles, whose loads have no masks, two steps of K to a word."""
    check(of_majorness((128, 256), (256, 256), MAJORNESS, tiled=True), MXFP8, F32, "sm_120")


def test_scaled_mm_of_every_format_pair_matches_fp64():
    pairs = [(a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    sides = [(operand(m, 128, a), operand(96, 128, b), torch.randn(96)) for m in (16, 130) for a, b in pairs]
    check(sides, MXFP8, F32, "sm_100")


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
def test_packed_mm_with_tiled_scales_on_one_side_matches_fp64(word):
    weight = packed_operand(272, 416, word)
    check([(packed_operand(m, 416, word, tiled=True), weight, None) for m in (16, 300)], word, BF16, "sm_100")


def test_packed_mm_with_fp16_result_matches_fp64():
    a, other, b = (packed_operand(rows, 130, MXFP4, spread=2) for rows in (9, 99, 70))
    check([(a, b, None), (other, b, None)], MXFP4, F16, "sm_120")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}{'ws' * c.warp_specialize}")
def test_product_through_the_accelerator_matches_fp64(config, word, monkeypatch):
    """Every configuration: several steps of K, tails, and second tiles of a program."""
    monkeypatch.setattr(configs, "tiled_products", lambda *_: [config])
    shapes = [(256, 384, 768), (150, 264, 96), (129, 520, 800), (300, 600, 64)]
    sides = [(side(m, k, word, tiled=True), side(n, k, word, tiled=True)) for m, n, k in shapes]
    calls = [(*pair, torch.randn(n).to(BF16)) for pair, (_, n, _) in zip(sides, shapes, strict=True)]
    check(calls, word, BF16, replace(SM_100, processors=4))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}{'ws' * c.warp_specialize}")
def test_scaled_mm_through_the_accelerator_of_other_layouts_matches_fp64(config, monkeypatch):
    """MN-major operands, E5M2, sides of less than a tile."""
    monkeypatch.setattr(configs, "tiled_products", lambda *_: [config])
    calls = of_majorness((256, 384), (384, 384), MAJORNESS[:3], tiled=True)
    for m, n, k in [(16, 8, 16), (129, 520, 400), (1, 16, 288)]:
        calls.append((operand(m, k, tiled=True), operand(n, k, E5M2, tiled=True), None))
    check(calls, MXFP8, F32, SM_100)


def test_tiled_wgrad_of_columnwise_copies_matches_fp64(monkeypatch):
    """wgrad from the columnwise copies as the cast writes them: dyᵀ · x, both MN-major."""
    monkeypatch.setattr(configs, "tiled_products", lambda *_: CONFIGS[:1])
    dy, x = torch.randn(160, 48).to(BF16), torch.randn(160, 80).to(BF16)

    def wgrad(dy, x):
        (a, sa), (b, sb) = (quantize(y, -2, E4M3.dtype, "rceil", False, "128x4") for y in (dy, x))
        return a, sa, b, sb, scaled_mm(a.t(), sa, b, sb, None, F32)

    *cast, out = run(wgrad, dy, x, target=SM_100)
    sides = [Operand(qdata=qdata.t(), scale=scale) for qdata, scale in (cast[:2], cast[2:])]
    assert_within(out, *product(sides[0].values, sides[1].values), 160)
    error = (out.double() - dy.double().t() @ x.double()).norm() / out.double().norm()
    assert error < 10 ** (-27.5 / 20)


@pytest.mark.parametrize(("target", "word"), CHIPS)
def test_nan_reaches_its_row_only(target, word):
    calls = [(side(m, 96, word), side(64, 96, word), None) for m in (7, 200)]
    for a, b, _ in calls:
        a.scale[3, 1] = b.scale[50, 2] = {MXFP8: 255, **NAN}[word]
    for out in products(calls, word, BF16, target):
        wanted = torch.zeros(out.shape, dtype=torch.bool)
        wanted[3], wanted[:, 50] = True, True
        assert torch.equal(out.isnan(), wanted)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_a_scale_for_every_column(target):
    """A weight joined of several weights has a global scale for each column of the product."""
    m, n, k = 40, 70, 96
    a, b = packed_operand(m, k, NVFP4), packed_operand(n, k, NVFP4)
    several = torch.exp2(torch.randn(1, n) * 3)
    arguments = [(*a.left, *b.right, None, F32, *[f"{NVFP4} packed"] * 2, [a.tensor, several])]
    (out,) = results_of_calls(ops.matmul, arguments, target=target)
    assert b.tensor is not None
    exact = b.values / b.tensor.double() * several.double().t()
    assert_within(out, *product(a.values, exact), k + 4)


def test_offsets_beyond_32_bits():
    """Rows of a 2^30 bytes apart. Only the pages that are written take memory."""
    check([(far_apart(operand(3, 64)), operand(40, 64), None)], MXFP8, F32, "sm_100")
