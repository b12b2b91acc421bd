"""The pass `quantize_gemms` on products written by hand: what they compute, and how many casts that takes.

Expected values come from `reference`, whose casts share no code with mxcompile, and FP64 products.
"""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand, assert_unchanged, calls, run
from helpers.reference import round_trip
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import E5M2, Format, Rounding, Tile
from mxcompile.graph.opsets import aten
from mxcompile.passes.quantize_gemms import QuantizeGemms
from mxcompile.policy import Gemm, Saved

MX = Format()
ROWS, N, K = 40, 48, 64


def random(*shape: int) -> Tensor:
    """Normal numbers of many magnitudes."""
    source = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=source) * torch.randn(shape, generator=source).exp()


X, W, DY = random(ROWS, K), random(N, K), random(ROWS, N)


def layer(x: Format = MX, w: Format = MX, dy: Format = MX, saved: Saved = Saved.COLUMNWISE) -> fx.Graph:
    """y = x·wᵀ, dx = dy·w, dw = dyᵀ·x, their operands in the formats given."""
    hand = Hand()
    x_in, w_in, dy_in = hand.input("x", ROWS, K), hand.input("w", N, K), hand.input("dy", ROWS, N)
    across, down = (
        hand.call(aten.permute.default, w_in, [1, 0]),
        hand.call(aten.permute.default, dy_in, [1, 0]),
    )
    y = hand.gemm(aten.mm.default, x_in, across, formats=(x, w), saved=saved)
    of_layer = {"layer": y.name, "saved": saved}
    dgrad = {**of_layer, "gemm": Gemm.DGRAD, "tensors": ("dy", "w"), "formats": (dy, w)}
    wgrad = {**of_layer, "gemm": Gemm.WGRAD, "tensors": ("dy", "x"), "formats": (dy, x)}
    dx = hand.gemm(aten.mm.default, dy_in, w_in, **dgrad)
    return hand.output(y, dx, hand.gemm(aten.mm.default, down, x_in, **wgrad))


def check(result: Tensor, left: Tensor, right: Tensor) -> None:
    """`result` is left · right, summed in FP32."""
    exact = left.double() @ right.double()
    largest = (left.double().abs() @ right.double().abs()).amax()
    assert (result - exact).abs().amax() <= 1e-6 * largest


def test_each_operand_is_cast_along_the_contraction():
    graph = layer()
    QuantizeGemms().apply(graph)
    y, dx, dw = run(graph, X, W, DY)
    check(y, round_trip(X, 1), round_trip(W, 1).T)
    check(dx, round_trip(DY, 1), round_trip(W, 0))
    check(dw, round_trip(DY, 0).T, round_trip(X, 0))
    assert len(calls(graph, ops.cast)) == 6
    assert not calls(graph, aten.mm.default)


def test_elements_and_roundings_are_those_of_the_tags():
    graph = layer(x=Format(rounding=Rounding.FLOOR), dy=Format(elem=E5M2))
    QuantizeGemms().apply(graph)
    y, dx, dw = run(graph, X, W, DY)
    check(y, round_trip(X, 1, rounding="floor"), round_trip(W, 1).T)
    check(dx, round_trip(DY, 1, "e5m2"), round_trip(W, 0))
    check(dw, round_trip(DY, 0, "e5m2").T, round_trip(X, 0, rounding="floor"))


def test_one_copy_of_a_weight_in_squares_serves_two_products():
    graph = layer(w=Format(tile=Tile.SQUARE))
    QuantizeGemms().apply(graph)
    y, dx, _ = run(graph, X, W, DY)
    square = round_trip(W, 1, square=True)
    check(y, round_trip(X, 1), square.T)
    check(dx, round_trip(DY, 1), square)
    assert len(calls(graph, ops.cast)) == 5


def test_wgrad_casts_the_rowwise_copy_under_transcode():
    graph = layer(saved=Saved.TRANSCODE)
    QuantizeGemms().apply(graph)
    check(run(graph, X, W, DY)[2], round_trip(DY, 0).T, round_trip(round_trip(X, 1), 0))


def test_a_scale_of_the_whole_tensor():
    """Elements are x ÷ (amax ÷ 448), rounded to nearest even by numpy's FP8."""
    word = "e4m3 tensor nearest"
    graph = layer(x=Format.parse(word), w=Format.parse(word))
    QuantizeGemms().apply(graph)
    scales = [value.abs().amax() / 448 for value in (X, W)]
    elements = [(value / scale).to(torch.float8_e4m3fn) for value, scale in zip((X, W), scales, strict=True)]
    left, right = (e.double() * s.double() for e, s in zip(elements, scales, strict=True))
    check(run(graph, X, W, DY)[0], left, right.T)
    assert calls(graph, ops.matmul)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 1), (1, 0), (3, 2)])
def test_bias_of_addmm_is_scaled_by_alpha_and_beta(alpha: int, beta: int):
    hand = Hand()
    bias, x, w = hand.input("bias", N), hand.input("x", ROWS, K), hand.input("w", K, N)
    product = hand.gemm(aten.addmm.default, bias, x, w, formats=(MX, MX))
    product.kwargs = {"alpha": alpha, "beta": beta}
    graph = hand.output(product)
    QuantizeGemms().apply(graph)
    added = random(N)
    check((run(graph, added, X, W.T)[0] - beta * added) / alpha, round_trip(X, 1), round_trip(W.T, 0))


def test_gemm_without_formats_is_left_unchanged():
    hand = Hand()
    graph = hand.output(hand.gemm(aten.mm.default, hand.input("x", ROWS, K), hand.input("w", K, N)))
    assert_unchanged(QuantizeGemms(), graph)
