"""The pass `seed`: which casts get random numbers, and which."""

from __future__ import annotations

import torch
from by_hand import Hand, assert_unchanged, calls, random, run
from helpers.casts import codes
from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import aten
from mxcompile.ops.view import Cast, result_of
from mxcompile.passes.seed import Seed

NEAREST, RANDOM = "e4m3 1x32 rceil", "e4m3 1x32 rceil stochastic"


def casts(*words: str) -> fx.Graph:
    """Casts of one tensor to the formats `words`; the graph returns what the casts do."""
    hand = Hand()
    x = hand.input("x", 4, 64)
    return hand.output(*(hand.call(ops.cast, x, codes(-1, word)) for word in words))


def test_each_random_cast_has_a_stream_of_one_seed():
    graph = casts(RANDOM, NEAREST, RANDOM)
    Seed().apply(graph)
    (seed,) = calls(graph, aten.randint.generator)
    first, plain, second = (Cast.read(node) for node in calls(graph, ops.cast))
    assert [(cast.seed, cast.stream) for cast in (first, plain, second)] == [(seed, 0), (None, 0), (seed, 1)]
    assert result_of(seed) == (None, -1)
    assert (seed.args, seed.kwargs["device"]) == ((1 << 32, [1]), torch.device("cpu"))
    assert (seed.meta["val"].shape, seed.meta["val"].dtype) == ((1,), torch.int64)


def test_a_cast_with_a_seed_keeps_it():
    hand = Hand()
    x, seed = hand.input("x", 4, 64), hand.input("seed", 1, dtype=torch.int64)
    graph = hand.output(hand.call(ops.cast, x, codes(-1, RANDOM), seed, 5))
    Seed().apply(graph)
    (cast,) = (Cast.read(node) for node in calls(graph, ops.cast))
    assert (cast.seed, cast.stream) == (seed, 5)
    assert not calls(graph, aten.randint.generator)


def test_runs_differ_but_for_the_seed_of_torch():
    graph = casts(RANDOM, RANDOM)
    Seed().apply(graph)
    x = random(4, 64)
    torch.manual_seed(7)
    (first, scales), (other, _) = run(graph, x)
    (reseeded, _), _ = run(graph, x)
    torch.manual_seed(7)
    (repeated, _), _ = run(graph, x)
    assert torch.equal(first.view(torch.uint8), repeated.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), other.view(torch.uint8))
    assert not torch.equal(first.view(torch.uint8), reseeded.view(torch.uint8))
    values = first.double() * (scales.double() - 127).exp2().repeat_interleave(32, 1)
    step = 2.0**-3 * x.double().abs().log2().floor().exp2()  # of elements of 3 bits of mantissa, normal ones
    assert ((values - x).abs() <= step.clamp(min=2.0**-9 * (scales.double().amax() - 127).exp2())).all()


def test_without_random_casts_nothing_is_drawn():
    graph = casts(NEAREST)
    assert_unchanged(Seed(), graph)
