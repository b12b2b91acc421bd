"""The pass `flatten` on the two graphs of a cast along a symbolic number of tokens."""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand, calls, random, run
from helpers.casts import quantize
from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import aten
from mxcompile.passes.flatten import Flatten

E4M3 = torch.float8_e4m3fn


def partitioned(dim: int, symbolic: tuple[int, ...]) -> tuple[fx.Graph, fx.Graph]:
    """x[80, 48] cast along `dim`: forward returns x + 1 and saves the cast, backward returns both parts."""
    forward = Hand()
    x = forward.input("x", 80, 48, symbolic=symbolic)
    saved = forward.parts(forward.quantize(x, dim, E4M3, "rceil"))
    backward = Hand(forward.mode)
    result = forward.call(aten.add.Tensor, x, 1)
    ends = [backward.end(node) for node in saved]
    values = [backward.call(aten.clone.default, end) for end in ends]
    return forward.output(result, *saved), backward.output(*values)


def test_a_scale_over_tokens_crosses_as_a_vector():
    forward, backward = partitioned(0, (0,))
    assert Flatten(num_outputs=1).apply(forward, backward)
    (flat,) = calls(forward, ops.flatten)
    assert forward.output_node().args[0][2] is flat
    x = random(80, 48)
    _, elements, scales = run(forward, x)
    assert scales.shape == (3 * 48,)
    expected = quantize(x, 0, E4M3, "rceil")
    values = run(backward, elements, scales)
    assert all(
        map(torch.equal, (v.view(torch.uint8) for v in values), (e.view(torch.uint8) for e in expected))
    )


@pytest.mark.parametrize(
    ("dim", "symbolic"), [(0, ()), (0, (0, 1))], ids=["a known number of tokens", "two symbols"]
)
def test_others_cross_as_they_are(dim: int, symbolic: tuple[int, ...]):
    forward, backward = partitioned(dim, symbolic)
    before = str(forward), str(backward)
    assert not Flatten(num_outputs=1).apply(forward, backward)
    assert (str(forward), str(backward)) == before


def test_the_outputs_of_the_model_stay():
    forward, backward = partitioned(0, (0,))
    assert not Flatten(num_outputs=3).apply(forward, backward)
