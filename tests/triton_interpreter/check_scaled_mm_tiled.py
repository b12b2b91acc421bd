"""The generated products through the tensor memory accelerator, on tiled scales, against FP64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.operands import Operand, assert_within, operand, product
from modules import results_of_calls, run

from mxcompile.formats import E5M2
from mxcompile.lowering.choices import configs
from mxcompile.lowering.choices.configs import tiled_configs
from mxcompile.lowering.targets import TARGETS, Target

SM_100 = TARGETS["sm_100"]
CONFIGS = tiled_configs(SM_100)
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


@pytest.fixture
def force(monkeypatch):
    """Function that makes every product run with one of the chip's configs."""

    def forced(config) -> None:
        monkeypatch.setattr(configs, "tiled_products", lambda *_: [config])

    return forced


def check(sides: list[tuple[Operand, Operand]], bias, out_dtype, target: Target = SM_100) -> None:
    calls = [(*a.left, *b.right, bias, out_dtype) for a, b in sides]
    for out, (a, b) in zip(results_of_calls(scaled_mm, calls, target=target), sides, strict=True):
        assert_within(out, *product(a.values, b.values, bias), a.qdata.shape[1])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_n}{'ws' * c.warp_specialize}")
def test_tiled_mm_of_every_config_matches_fp64(config, force):
    force(config)
    layouts = [(True, True), (True, False), (False, False)]
    shape = {"k": 384, "tiled": True}
    sides = [(operand(256, k_major=a, **shape), operand(384, k_major=b, **shape)) for a, b in layouts]
    check(sides, torch.randn(384).to(BF16), BF16)


def test_tiled_mm_of_partial_tiles_matches_fp64(force):
    force(CONFIGS[0])
    shapes = [(16, 8, 16), (150, 264, 96), (129, 520, 400), (1, 16, 288)]
    check([(operand(m, k, tiled=True), operand(n, k, E5M2, tiled=True)) for m, n, k in shapes], None, F32)


def test_more_tiles_than_processors(force):
    """Every program of the persistent grid takes its second tile."""
    force(CONFIGS[0])
    sides = [(operand(300, 32, tiled=True), operand(600, 32, tiled=True))]
    check(sides, None, F32, replace(SM_100, processors=4))


def test_tiled_wgrad_of_columnwise_copies_matches_fp64(force):
    """wgrad from the columnwise copies as the cast writes them: dyᵀ · x, both MN-major."""
    force(CONFIGS[0])
    dy, x = torch.randn(160, 48).to(BF16), torch.randn(160, 80).to(BF16)

    def wgrad(dy, x):
        (a, sa), (b, sb) = (quantize(side, -2, E4M3, "rceil", False, "128x4") for side in (dy, x))
        return a, sa, b, sb, scaled_mm(a.t(), sa, b, sb, None, F32)

    *cast, out = run(wgrad, dy, x, target=SM_100)
    sides = [Operand(qdata=qdata.t(), scale=scale) for qdata, scale in (cast[:2], cast[2:])]
    assert_within(out, *product(sides[0].values, sides[1].values), 160)
    error = (out.double() - dy.double().t() @ x.double()).norm() / out.double().norm()
    assert error < 10 ** (-27.5 / 20)
