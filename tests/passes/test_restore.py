"""The pass `restore` on degenerate products that stay in their dtype."""

from __future__ import annotations

import torch
from by_hand import Hand, calls, random, run

from mxcompile.formats import Format
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import tag_of
from mxcompile.passes.restore import Restore

BF16 = torch.bfloat16
MX = Format(), Format()


def test_an_outer_product_is_a_multiplication():
    hand = Hand()
    graph = hand.output(
        hand.gemm(aten.mm.default, hand.input("x", 5, 1, dtype=BF16), hand.input("w", 1, 3, dtype=BF16))
    )
    Restore().apply(graph)
    assert len(calls(graph, aten.mul.Tensor)) == 1
    assert not calls(graph, aten.mm.default)
    (kept,) = [kept for node in graph.nodes if (kept := tag_of(node)) is not None]
    assert kept.kernel == "aten.mul"
    x, w = random(5, 1, dtype=BF16), random(1, 3, dtype=BF16)
    assert torch.equal(run(graph, x, w)[0], (x.double() * w.double()).to(BF16))


def test_a_vector_is_multiplied_and_summed_in_fp32():
    hand = Hand()
    graph = hand.output(
        hand.gemm(aten.mv.default, hand.input("m", 6, 40, dtype=BF16), hand.input("v", 40, dtype=BF16))
    )
    Restore().apply(graph)
    assert not calls(graph, aten.mv.default)
    m, v = random(6, 40, dtype=BF16), random(40, dtype=BF16)
    result = run(graph, m, v)[0]
    assert result.dtype is BF16
    torch.testing.assert_close(result.double(), m.double() @ v.double(), rtol=2**-8, atol=1e-6)


def test_other_contractions_formats_and_dtypes_are_not_decomposed():
    hand = Hand()
    x, w = hand.input("x", 5, 2), hand.input("w", 2, 3)
    column, row = hand.input("one", 5, 1), hand.input("row", 1, 3)
    kept = hand.gemm(aten.mm.default, x, w), hand.gemm(aten.mm.default, column, row, formats=MX)
    graph = hand.output(*kept)
    Restore().apply(graph)
    assert calls(graph, aten.mm.default) == [*kept]
