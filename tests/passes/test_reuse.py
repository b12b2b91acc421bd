"""The pass `reuse`: casts of stored weights that change nothing are gone, and only those."""

from __future__ import annotations

import operator

import pytest
import torch
from by_hand import Hand, calls, run
from torch import fx

from mxcompile import ops
from mxcompile.errors import PolicyError
from mxcompile.graph.opsets import aten
from mxcompile.passes.reuse import Reuse

E4M3, E5M2, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32


def recast(
    dim: int = -1, elem: torch.dtype = E4M3, rounding: str = "rceil", *, between: torch.dtype = FP32,
    transposed: bool = False,
) -> fx.Graph:  # fmt: skip
    """Codes [64, 96] and their scales along the last dimension, dequantized and cast again."""
    hand = Hand()
    codes, scales = hand.input("codes", 64, 96, dtype=E4M3), hand.input("scales", 64, 3, dtype=torch.uint8)
    values = hand.call(ops.dequantize, codes, scales, -1, between)
    if transposed:
        values = hand.call(aten.permute.default, values, [1, 0])
    cast = hand.call(ops.quantize, values, dim, elem, rounding)
    return hand.output(*(hand.call(operator.getitem, cast, part) for part in (0, 1)))


def stored() -> list[torch.Tensor]:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    return [*ops.quantize(x * x.exp(), -1, E4M3, "rceil")]


@pytest.mark.parametrize("between", [FP32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "transposed"), [(-1, False), (0, True)])
def test_what_is_stored_is_read(dim: int, transposed: bool, between: torch.dtype):
    graph = recast(dim, transposed=transposed, between=between)
    Reuse().apply(graph)
    assert not calls(graph, ops.quantize)
    assert not calls(graph, ops.dequantize)
    parts = stored()
    expected = [part.T for part in parts] if transposed else parts
    results = [result.view(torch.uint8) for result in run(graph, *parts)]
    assert all(map(torch.equal, results, [part.view(torch.uint8) for part in expected]))


@pytest.mark.parametrize(
    "graph",
    [
        recast(0), recast(-1, E5M2), recast(rounding="floor"), recast(between=torch.float16),
        recast(-1, transposed=True),
    ],
    ids=["another dimension", "other elements", "floor", "FP16 between", "the other side of a transpose"],
)  # fmt: skip
def test_other_casts_stay(graph: fx.Graph):
    before = str(graph)
    Reuse().apply(graph)
    assert str(graph) == before


def gathered(rounding: str) -> fx.Graph:
    """Codes in tiles of 32×32, cast in tiles with scales rounded by `rounding`; they were with rceil."""
    hand = Hand()
    codes, scales = hand.input("codes", 64, 96, dtype=E4M3), hand.input("scales", 2, 3, dtype=torch.uint8)
    cast = hand.call(
        ops.quantize, hand.call(ops.dequantize_tiles, codes, scales, "rceil", FP32), -1, E4M3, rounding, True
    )
    parts = [hand.call(operator.getitem, cast, part) for part in (0, 1)]
    return hand.output(*(hand.call(aten.clone.default, part) for part in parts))


def test_tiles_that_were_gathered_are_read():
    graph = gathered("rceil")
    Reuse().apply(graph)
    assert not calls(graph, ops.quantize)
    codes = torch.arange(64 * 96).remainder(120).to(torch.uint8).view(64, 96).view(E4M3)
    scales = torch.arange(6, dtype=torch.uint8).view(2, 3) + 120
    elements, rows = run(graph, codes, scales)
    assert torch.equal(elements.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(rows, scales.repeat_interleave(32, 0))


def test_a_policy_that_wants_them_otherwise_is_an_error():
    with pytest.raises(PolicyError, match="gathered in 32×32 tiles"):
        Reuse().apply(gathered("floor"))
