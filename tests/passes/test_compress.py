"""The pass `compress` on the two graphs of one layer: what crosses, and what backward computes of it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from by_hand import Hand, calls, random, run
from helpers.reference import round_trip
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.opsets import aten
from mxcompile.models.names import GraphInput
from mxcompile.passes.compress import Compress
from mxcompile.policy import Role, Saved

E4M3 = torch.float8_e4m3fn
INPUTS = GraphInput(), GraphInput(path="w", static=True)
MX = Format(), Format()


class Pair:
    """h = 2x; y = h·w, of a layer whose input is saved as its tag says; backward has h and dy."""

    def __init__(self, width: int = 64, dtype: torch.dtype = torch.float32, **facts: Any) -> None:
        self.forward = Hand()
        x = self.forward.input("x", 40, width, dtype=dtype)
        w = self.forward.input("w", width, 48, dtype=dtype)
        self.h = self.forward.call(aten.mul.Tensor, x, 2)
        facts_of_gemm = {"role": Role.QKV, "saved": Saved.MXFP8, "formats": MX} | facts
        self.y = self.forward.gemm(aten.mm.default, self.h, w, **facts_of_gemm)
        self.backward = Hand(self.forward.mode)
        self.end = self.backward.end(self.h)
        self.dy = self.backward.input("dy", 40, width, dtype=dtype)

    def compress(self, *gradients: fx.Node) -> bool:
        """Backward returns `gradients`. Returns whether anything changed."""
        self.graphs = self.forward.output(self.y, self.h), self.backward.output(*gradients)
        return Compress(num_outputs=1, inputs=INPUTS).apply(*self.graphs)

    def run(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What is saved, and the gradients."""
        _, *saved = run(self.graphs[0], x, w)
        return tuple(saved), run(self.graphs[1], *saved, dy)


X, W, DY = random(40, 64), random(64, 48), random(40, 64)


def test_backward_reads_the_copy_in_the_place_of_the_value():
    pair = Pair()
    assert pair.compress(pair.backward.call(aten.mul.Tensor, pair.end, pair.dy))
    saved, (gradient,) = pair.run(X, W, DY)
    assert [(part.dtype, tuple(part.shape)) for part in saved] == [(E4M3, (40, 64)), (torch.uint8, (40, 2))]
    assert torch.equal(gradient, round_trip(2 * X, 1) * DY)


def test_cast_of_backward_is_saved_in_place_of_its_source():
    pair = Pair()
    elements = pair.backward.call(operator.getitem, pair.backward.quantize(pair.end, 0, E4M3, "floor"), 0)
    assert pair.compress(elements, pair.backward.call(aten.mul.Tensor, pair.end, pair.dy))
    assert not calls(pair.graphs[1], ops.cast)
    (_, scales), (codes, gradient) = pair.run(X, W, DY)
    assert scales.shape == (2, 64)
    expected = round_trip(2 * X, 0, rounding="floor")
    values = codes.double() * (scales.double() - 127).exp2().repeat_interleave(32, 0)[:40]
    assert torch.equal(values, expected)
    assert torch.equal(gradient, expected * DY)


@pytest.mark.parametrize(
    "facts",
    [{"saved": Saved.COLUMNWISE}, {"width": 16}, {"dtype": torch.float16}],
    ids=["columnwise", "rows shorter than a block", "FP16"],
)
def test_others_are_saved_as_they_are(facts: dict[str, Any]):
    pair = Pair(**facts)
    assert not pair.compress(pair.backward.call(aten.mul.Tensor, pair.end, pair.dy))


def test_input_of_a_full_precision_product_is_not_compressed():
    pair = Pair()
    view = pair.backward.call(aten.permute.default, pair.end, [1, 0])
    assert not pair.compress(pair.backward.gemm(aten.mm.default, view, pair.dy))


def test_two_different_copies_are_not_kept():
    pair = Pair()
    casts = [pair.backward.quantize(pair.end, dim, E4M3, "rceil") for dim in (0, 1)]
    assert not pair.compress(*(pair.backward.call(operator.getitem, cast, 0) for cast in casts))


def by_rows(*symbolic: int) -> tuple[fx.Graph, fx.Graph]:
    """h[5, 8, 64] = 2x is saved. Backward has 3h, and casts the rows of h, of which it has no other shape."""
    forward = Hand()
    h = forward.call(aten.mul.Tensor, forward.input("x", 5, 8, 64, symbolic=symbolic), 2)
    rows, w = forward.call(aten.view.default, h, [-1, 64]), forward.input("w", 64, 48)
    y = forward.gemm(aten.mm.default, rows, w, role=Role.QKV, saved=Saved.MXFP8, formats=MX)
    backward = Hand(forward.mode)
    end = backward.end(h)
    cast = backward.quantize(backward.call(aten.view.default, end, [-1, 64]), 0, E4M3, "rceil")
    codes = backward.call(operator.getitem, cast, 0)
    return forward.output(y, h), backward.output(codes, backward.call(aten.mul.Tensor, end, 3))


def test_a_rowwise_cast_is_saved_for_backward():
    graphs = by_rows()
    assert Compress(num_outputs=1, inputs=INPUTS).apply(*graphs)
    _, *saved = run(graphs[0], X.view(5, 8, 64), W)
    codes, gradient = run(graphs[1], *saved)
    assert torch.equal(codes.view(torch.uint8), saved[0].view(torch.uint8))
    assert torch.equal(gradient, 3 * round_trip(2 * X, 0).view(5, 8, 64))


def test_a_value_whose_shape_backward_cannot_know_stays():
    """The number of rows, which the cast has, is not the two sizes that make it."""
    graphs = by_rows(0, 1)
    before = [str(graph) for graph in graphs]
    assert not Compress(num_outputs=1, inputs=INPUTS).apply(*graphs)
    assert [str(graph) for graph in graphs] == before
