"""Pairing a rowwise and a columnwise cast of one tensor."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile import ops
from mxcompile.lowering.graph.merge_casts import MergeCasts
from mxcompile.lowering.targets import TARGETS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _graph(function, *inputs) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def _casts(module: fx.GraphModule) -> list[int]:
    """How many copies each cast makes."""
    return [len(node.args[1]) for node in module.graph.find_nodes(op="call_function", target=ops.cast)]


@pytest.mark.parametrize("dims", [(-1, -2), (-2, -1), (1, 0)])
def test_a_pair_is_merged_and_means_the_same(dims):
    def both(x):
        first = quantize(x, dims[0], E4M3, "rceil")
        y = x + 1
        second = quantize(x, dims[1], E4M3, "rceil")
        return (*first, y, *second)

    x = torch.randn(70, 96)
    module = _graph(both, x)
    expected = module(x)
    MergeCasts(target=TARGETS["sm_100"], device="cpu").apply(module.graph)
    module.graph.lint()
    module.recompile()
    assert _casts(module) == [2]
    for got, wanted in zip(module(x), expected, strict=True):
        assert got.dtype is wanted.dtype
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


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
    module = _graph(lambda x: (*quantize(x, *first), *quantize(x, *second)), torch.randn(64, 64))
    MergeCasts(target=TARGETS["sm_100"], device="cpu").apply(module.graph)
    assert _casts(module) == [1, 1]


def test_casts_of_different_tensors_stay():
    def both(x):
        return (*quantize(x, -1, E4M3, "rceil"), *quantize(x + 1, -2, E4M3, "rceil"))

    module = _graph(both, torch.randn(64, 64))
    MergeCasts(target=TARGETS["sm_100"], device="cpu").apply(module.graph)
    assert _casts(module) == [1, 1]


def test_a_pair_of_a_batch_is_merged():
    def both(x):
        return (*quantize(x, -1, E4M3, "rceil"), *quantize(x, 1, E4M3, "rceil"))

    x = torch.randn(2, 70, 96)
    module = _graph(both, x)
    expected = module(x)
    MergeCasts(target=TARGETS["sm_100"], device="cpu").apply(module.graph)
    module.recompile()
    assert _casts(module) == [2]
    for got, wanted in zip(module(x), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def test_casts_along_a_batch_stay():
    def both(x):
        return (*quantize(x, -1, E4M3, "rceil"), *quantize(x, 0, E4M3, "rceil"))

    module = _graph(both, torch.randn(2, 64, 64))
    MergeCasts(target=TARGETS["sm_100"], device="cpu").apply(module.graph)
    assert _casts(module) == [1, 1]
