"""Pairing a rowwise and a columnwise cast of one tensor."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import quantize
from helpers.graphs import lowered, traced
from torch import fx

from mxcompile import ops
from mxcompile.lowering.graph.merge_casts import MergeCasts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


PLAIN = (E4M3, "rceil")


def merged(function, *inputs) -> tuple[fx.GraphModule, list[int]]:
    """The graph of `function` after the pass, and how many copies each of its casts makes."""
    module, _ = lowered([MergeCasts], "sm_100", traced(function, *inputs))
    casts = module.graph.find_nodes(op="call_function", target=ops.cast)
    return module, [len(node.args[1]) for node in casts]


@pytest.mark.parametrize("shape", [(70, 96), (2, 70, 96)], ids=str)
@pytest.mark.parametrize("dims", [(-1, -2), (-2, -1)])
def test_a_pair_is_merged_and_means_the_same(dims: tuple[int, int], shape: tuple[int, ...]):
    """Of a matrix or a batch, its dimensions counted from either end."""

    def both(x):
        first = quantize(x, dims[0] % x.ndim, *PLAIN)
        y = x + 1
        return *first, y, *quantize(x, dims[1], *PLAIN)

    x = torch.randn(shape)
    module, casts = merged(both, x)
    assert casts == [2]
    assert_same_bits(module(x), both(x))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((-1, E4M3, "rceil"), (-1, E4M3, "floor")),
        ((-1, E4M3, "rceil"), (-2, E5M2, "rceil")),
        ((-1, E4M3, "rceil"), (-2, E4M3, "floor")),
        ((-1, E4M3, "rceil", True), (-2, E4M3, "rceil", True)),
    ],
)
def test_casts_of_different_formats_stay_separate(first, second):
    _, casts = merged(lambda x: (*quantize(x, *first), *quantize(x, *second)), torch.randn(64, 64))
    assert casts == [1, 1]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: (*quantize(x, -1, *PLAIN), *quantize(x + 1, -2, *PLAIN)), (64, 64)),
        (lambda x: (*quantize(x, -1, *PLAIN), *quantize(x, 0, *PLAIN)), (2, 64, 64)),
    ],
    ids=["two tensors", "along a batch"],
)
def test_casts_that_share_no_matrix_stay_separate(function, shape):
    assert merged(function, torch.randn(shape))[1] == [1, 1]
