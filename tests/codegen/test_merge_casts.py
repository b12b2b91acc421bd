"""One cast for both copies of a tensor, one byte or packed, and one for the amax of both."""

from __future__ import annotations

import operator

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.casts import encode_packed, quantize
from helpers.graphs import calls, lowered, operators, traced
from torch import Tensor, fx

from mxcompile import ops
from mxcompile.errors import FormatError
from mxcompile.lowering.graph.merge_casts import MergeCasts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = (E4M3, "rceil")
NVFP4, MXFP4 = "e2m1 1x16 two-level", "e2m1 1x32 rceil"
SIGNS = 55272
ROTATED = f"{NVFP4} hadamard:{SIGNS}"


def merged(function, *inputs: Tensor) -> fx.GraphModule:
    """The graph of `function` behind the pass."""
    module, _ = lowered([MergeCasts], "sm_100", traced(function, *inputs))
    return module


def copies(module: fx.GraphModule) -> list[int]:
    """How many copies each cast makes."""
    return [len(node.args[1]) for node in calls(module, ops.cast)]


@pytest.mark.parametrize("shape", [(70, 96), (2, 70, 96)], ids=str)
@pytest.mark.parametrize("dims", [(-1, -2), (-2, -1)])
def test_a_pair_is_merged_and_means_the_same(dims: tuple[int, int], shape: tuple[int, ...]):
    """Of a matrix or a batch, its dimensions counted from either end."""

    def both(x):
        first = quantize(x, dims[0] % x.ndim, *PLAIN)
        y = x + 1
        return *first, y, *quantize(x, dims[1], *PLAIN)

    x = torch.randn(shape)
    module = merged(both, x)
    assert copies(module) == [2]
    assert_same_bits(module(x), both(x))


@pytest.mark.parametrize(
    ("first", "second", "added", "shape"),
    [
        ((-1, E4M3, "rceil"), (-1, E4M3, "floor"), 0, (64, 64)),
        ((-1, E4M3, "rceil"), (-2, E5M2, "rceil"), 0, (64, 64)),
        ((-1, E4M3, "rceil"), (-2, E4M3, "floor"), 0, (64, 64)),
        ((-1, E4M3, "rceil", True), (-2, E4M3, "rceil", True), 0, (64, 64)),
        ((-1, *PLAIN), (-2, *PLAIN), 1, (64, 64)),
        ((-1, *PLAIN), (0, *PLAIN), 0, (2, 64, 64)),
    ],
    ids=["rounding", "element", "rounding across", "squares", "two tensors", "along a batch"],
)
def test_casts_of_different_formats_or_matrices_stay_separate(first, second, added, shape):
    def function(x):
        return *quantize(x, *first), *quantize(x + 1 if added else x, *second)

    assert copies(merged(function, torch.randn(shape))) == [1, 1]


@pytest.mark.parametrize("columns_first", [False, True])
def test_both_copies_and_their_amax(columns_first: bool):
    """The operands of fprop and wgrad: one is transformed, and the amax of both is known before."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        results: dict[bool, tuple[Tensor, ...]] = {}
        for columns in (columns_first, not columns_first):
            (amax,) = ops.cast(x, [f"{ROTATED} packed @-2 largest"]) if columns else [ops.largest(x)]
            word = ROTATED if columns else NVFP4
            results[columns] = *encode_packed(x, -2 if columns else -1, word, None, 0, amax), amax
        return results[False] + results[True]

    x = torch.randn(70, 96)
    module = merged(function, x)
    assert operators(module) == ["cast", "cast"]
    assert_same_bits(module(x), function(x))


def test_a_weight_has_one_amax_for_both():
    def function(w: Tensor) -> list[Tensor]:
        amax = ops.largest(w)
        first, second = (encode_packed(w, dim, "e2m1 16x16 two-level", None, 0, amax) for dim in (-2, -1))
        return first + second

    w = torch.randn(64, 96)
    module = merged(function, w)
    assert operators(module) == ["largest", "cast"]
    assert_same_bits(module(w), function(w))


def test_casts_that_cannot_be_one_stay():
    """Random ones, two layouts, one side twice, two tensors, an amax computed from the first copy."""
    seed = torch.tensor([3])

    def function(x: Tensor, y: Tensor, z: Tensor, v: Tensor, u: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        random = [encode_packed(x, dim, f"{MXFP4} stochastic", seed, 5) for dim in (-1, -2)]
        layouts = [encode_packed(y, -1, MXFP4), encode_packed(y, -2, MXFP4, None, 0, None, "row-major")]
        twice = [encode_packed(z, -1, MXFP4), encode_packed(z, -1, MXFP4)]
        two = [encode_packed(u, -1, MXFP4), encode_packed(u + 1, -2, MXFP4)]
        first = encode_packed(v, -1, NVFP4, None, 0, ops.largest(v))
        late = encode_packed(v, -2, NVFP4, None, 0, first[0][0, :1].float())
        return tuple(result for cast in (*random, *layouts, *twice, *two, first, late) for result in cast)

    inputs = [torch.randn(32, 64) for _ in range(5)]
    module = merged(function, *inputs, seed)
    assert operators(module).count("cast") == 10


def test_a_transform_runs_along_columns():
    x = torch.randn(32, 64)
    with pytest.raises(FormatError, match="its Hadamard transform runs along columns"):
        encode_packed(x, -1, ROTATED, None, 0, ops.largest(x))


def test_a_result_that_nothing_reads_is_not_picked():
    function = lambda x: (encode_packed(x, -1, MXFP4)[0], encode_packed(x, -2, MXFP4)[0])  # noqa: E731
    module = merged(function, torch.randn(32, 64))
    picks = [node.args[1] for node in module.graph.nodes if node.target is operator.getitem]
    assert sorted(picks) == [0, 2]
