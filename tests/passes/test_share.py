"""The pass `share`: which nodes are equal."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from by_hand import Hand, assert_unchanged, calls, run
from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import aten
from mxcompile.passes.share import Share

E4M3 = torch.float8_e4m3fn
Cast = Callable[[Hand, fx.Node], fx.Node]


def cast(hand: Hand, x: fx.Node, dim: int = -1, rounding: str = "rceil", square: bool = False) -> fx.Node:
    """A cast of a view of `x`."""
    return hand.quantize(hand.call(aten.view.default, x, [8, 64]), dim, E4M3, rounding, square)


def twice(first: Cast, second: Cast) -> fx.Graph:
    """x[2, 4, 64], cast by `first` and by `second`."""
    hand = Hand()
    x = hand.input("x", 2, 4, 64)
    return hand.output(*hand.parts(first(hand, x)), *hand.parts(second(hand, x)))


def test_equal_casts_of_equal_views_are_one():
    graph = twice(cast, cast)
    Share().apply(graph)
    assert len(calls(graph, ops.cast)) == len(calls(graph, aten.view.default)) == 1
    assert len(calls(graph, operator.getitem)) == 2
    codes, scales, *duplicates = run(graph, torch.randn(2, 4, 64))
    assert duplicates[0] is codes
    assert duplicates[1] is scales


@pytest.mark.parametrize(
    "other",
    [
        lambda hand, x: cast(hand, x, 0),
        lambda hand, x: cast(hand, x, rounding="floor"),
        lambda hand, x: cast(hand, x, square=True),
    ],
    ids=["along another dimension", "another rounding", "in squares"],
)
def test_casts_with_different_arguments_are_not_shared(other: Cast):
    graph = twice(cast, other)
    Share().apply(graph)
    assert len(calls(graph, ops.cast)) == 2


@pytest.mark.parametrize(("regions", "count"), [((1, 1), 1), ((1, 2), 2)])
def test_checkpointed_regions_keep_their_own(regions: tuple[int, int], count: int):
    graph = twice(cast, cast)
    for node, region in zip(calls(graph, ops.cast), regions, strict=True):
        node.meta["ac_graph_id"] = region
    Share().apply(graph)
    assert len(calls(graph, ops.cast)) == count


def test_operators_that_no_pass_made_and_gemms_stay():
    hand = Hand()
    x, w = hand.input("x", 4, 4), hand.input("w", 4, 4)
    sums = [hand.call(aten.add.Tensor, x, w) for _ in range(2)]
    graph = hand.output(*sums, *(hand.gemm(aten.mm.default, x, w) for _ in range(2)))
    assert_unchanged(Share(), graph)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_masks_that_decide_sizes_stay():
    """Fake tensors remember one size for each mask, where the graph has one for each reading of it."""
    x, weight, mask = torch.randn(6, 8), torch.randn(8, 4), torch.rand(16) > 0.3

    def pruned(x: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[:, mask[:8]] @ weight[mask[:8]]

    torch._dynamo.reset()
    compiled = torch.compile(pruned, backend="mxfp8", options={"policy": "bf16"}, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, mask), pruned(x, weight, mask))
