"""Choosing the casts that write tiled scales, and what reads those."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import quantize, scaled_mm
from helpers.graphs import calls, lowered, traced
from torch import fx

from mxcompile import ops
from mxcompile.lowering.graph.expand import Expand
from mxcompile.lowering.graph.tile_scales import TileScales
from mxcompile.lowering.targets import TARGETS

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def _tiled(function, *inputs) -> tuple[fx.GraphModule, list[int]]:
    """The graph of `function` after the pass, and the ranks of the scales its casts write."""
    module, _ = lowered([TileScales], "sm_100", traced(function, *inputs))
    casts = calls(module, ops.cast)
    assert all((cast.meta["val"][1].ndim == 1) == ("128x4" in cast.args[1][0]) for cast in casts)
    return module, [cast.meta["val"][1].ndim for cast in casts]


def _quantize(x, dim, *square):
    return quantize(x, dim, E4M3, "rceil", *square)


def _t(operand):
    return tuple(side.t() for side in operand)


def _step(x, w, dy):
    """fprop, dgrad and wgrad of a linear layer as the passes write them: x·wᵀ, dy·w, dyᵀ·x."""
    y = scaled_mm(*_quantize(x, -1), *_t(_quantize(w, -1)), None, BF16)
    dx = scaled_mm(*_quantize(dy, -1), *_quantize(w, -2), None, BF16)
    dw = scaled_mm(*_t(_quantize(dy, -2)), *_quantize(x, -2), None, BF16)
    return y, dx, dw


def _matrices(*shapes):
    return [torch.randn(shape).mul_(torch.exp2(torch.randint(-20, 20, shape))) for shape in shapes]


def test_all_casts_of_a_layer_and_the_same_results():
    matrices = _matrices((150, 72), (40, 72), (150, 40))
    module, ranks = _tiled(_step, *matrices)
    assert ranks == [1] * 6
    assert_same_bits(module(*matrices), _step(*matrices))
    assert all(node.meta["val"].ndim == 2 for node in calls(module, torch.ops.aten.t.default))


def test_not_where_the_chip_reads_rows():
    """The pass asks the table, not the name of the chip."""
    assert TileScales(target=TARGETS["sm_100"], device="cpu").applies
    rows = replace(TARGETS["sm_100"], scale_layout=TARGETS["gfx950"].scale_layout)
    for target in (rows, TARGETS["sm_90"], TARGETS["gfx950"], TARGETS["cpu"]):
        assert not TileScales(target=target, device="cpu").applies


def test_tiled_scales_of_symbolic_sizes_add_no_guards():
    """A scale is a number of whole tiles for any token count, and nothing is asked of the sizes."""
    matrices = _matrices((150, 72), (40, 72), (150, 40))
    module = traced(_step, *matrices, mode="symbolic")
    guards = next(iter(module.graph.nodes)).meta["val"].fake_mode.shape_env.guards
    before = len(guards)
    lowered([TileScales], "sm_100", module)
    assert len(guards) == before
    lengths = [node.meta["val"][1].shape[0] for node in calls(module, ops.cast)]
    assert len(lengths) == 6
    assert all(length.node.expr % 512 == 0 for length in lengths)
    others = _matrices((300, 72), (40, 72), (300, 40))
    assert_same_bits(module(*others), _step(*others))


def test_a_scale_that_something_else_reads_stays():
    def step(x, w):
        rowwise = _quantize(x, -1)
        decoded = ops.decode(*rowwise, -1, "e4m3 1x32 rceil", torch.float32)  # the other copy is made of it
        columnwise, weight = _quantize(decoded, -2), _quantize(w, -2)
        return [scaled_mm(*a, *weight, None, BF16) for a in (rowwise, _t(columnwise))]

    x, w = _matrices((64, 64), (64, 96))
    assert _tiled(step, x, w)[1] == [2, 1, 1]


def test_a_scale_that_the_model_returns_stays():
    def step(x, w):
        a = _quantize(x, -1)
        return scaled_mm(*a, *_quantize(w, -2), None, BF16), a[1]

    assert _tiled(step, *_matrices((64, 64), (64, 96)))[1] == [2, 1]


def test_scales_of_squares_batches_and_empty_operands_are_not_tiled():
    def squares(x, w):
        return scaled_mm(*_quantize(x, -1), *_t(_quantize(w, -1, True)), None, BF16)

    def batches(x, w):
        return scaled_mm(*_quantize(x, -1), *_quantize(w, -2), None, BF16)

    assert _tiled(squares, *_matrices((64, 64), (96, 64)))[1] == [1, 2]
    assert _tiled(batches, *_matrices((2, 64, 64), (2, 64, 96)))[1] == [2 + 1] * 2
    assert _tiled(batches, *_matrices((0, 64), (64, 96)))[1] == [2, 2]


def test_a_weight_that_is_stored_quantized_stays():
    def step(x, w, scale):
        return scaled_mm(*_quantize(x, -1), w.t(), scale.t(), None, BF16)

    x, w = _matrices((150, 72), (40, 72))
    stored = _quantize(w, -1)
    module, ranks = _tiled(step, x, *stored)
    assert ranks == [1]
    assert torch.equal(module(x, *stored), step(x, *stored))


def test_another_device_than_the_targets_stays():
    module = traced(_step, *_matrices((64, 64), (64, 64), (64, 64)))
    TileScales(target=TARGETS["sm_100"], device="cuda").apply(module.graph)
    assert not [node for node in module.graph.nodes if "128x4" in node.args]


@pytest.mark.parametrize("transposed", [False, True])
def test_backward_product_with_tiled_scales_is_dequantized(transposed):
    """A backward graph holds tiled scales it was given, and dequantizes them."""

    def backward(a, scale_a, b, scale_b):
        return scaled_mm(a.t() if transposed else a, scale_a, b, scale_b, None, torch.float32)

    x, w = _matrices((72, 150) if transposed else (150, 72), (72, 40))
    a = quantize(x, -2 if transposed else -1, E4M3, "rceil", False, "128x4")
    b = quantize(w, -2, E4M3, "rceil", False, "128x4")
    module, _ = lowered([Expand], "sm_100", traced(backward, *a, *b))
    assert not calls(module, ops.matmul)
    torch.testing.assert_close(module(*a, *b), backward(*a, *b), rtol=1e-5, atol=0)
