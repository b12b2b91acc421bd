"""The pass `cache` on one product of a weight: kept casts, and the reason of each that is not."""

from __future__ import annotations

import operator

import pytest
import torch
from by_hand import Hand, calls
from torch import fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import WEIGHT_KEY, tag_of
from mxcompile.models.names import GraphInput
from mxcompile.passes.cache import Cache
from mxcompile.policy import Choice, Code, Reason, Weights

E4M3, FP32, FP16 = torch.float8_e4m3fn, torch.float32, torch.float16
INPUTS = GraphInput(), GraphInput(path="up.weight", static=True)


def product(
    *, weights: Weights = Weights.CACHED, dtype: torch.dtype = FP32, computed: bool = False
) -> tuple[fx.Graph, fx.Node]:
    """x·w of quantized operands. computed: whether the weight is twice the parameter."""
    hand = Hand()
    x, w = hand.input("x", 64, 32, dtype=dtype), hand.input("w", 32, 96, dtype=dtype)
    if computed:
        w = hand.call(aten.mul.Tensor, w, 2)
    casts = hand.call(ops.quantize, x, -1, E4M3, "rceil"), hand.call(ops.quantize, w, 0, E4M3, "rceil")
    parts = [hand.call(operator.getitem, cast, part) for cast in casts for part in (0, 1)]
    choice = Choice(precision="mxfp8", reason=Reason(Code.RULE, 1))
    facts = {"formats": (Format(), Format()), "choice": choice, "weights": weights}
    node = hand.gemm(ops.scaled_mm, *parts, None, FP32, **facts)
    return hand.output(node), node


def test_the_cast_of_the_weight_is_kept_under_its_path():
    graph, _ = product()
    Cache(inputs=INPUTS, prefix="layers.0").apply(graph)
    (kept,) = calls(graph, ops.quantize_cached)
    (cast,) = calls(graph, ops.quantize)
    assert (kept.args[1:], kept.meta[WEIGHT_KEY]) == ((0, E4M3, "rceil", False), "layers.0.up.weight")
    assert (str(kept.args[0]), str(cast.args[0])) == ("w", "x")


@pytest.mark.parametrize(
    ("facts", "obstacle", "reason"),
    [
        ({"computed": True}, "", "it is computed"),
        ({"dtype": FP16}, "", "its dtype is float16"),
        ({}, "no kernel keeps it", "no kernel keeps it"),
    ],
)
def test_a_cast_that_is_not_kept_has_a_reason(facts: dict[str, object], obstacle: str, reason: str):
    graph, node = product(**facts)
    Cache(inputs=INPUTS, obstacle=obstacle).apply(graph)
    tag = tag_of(node)
    assert tag is not None
    assert tag.choice is not None
    assert str(tag.choice.reason).endswith(reason)
    assert not calls(graph, ops.quantize_cached)


def test_nothing_is_kept_that_the_policy_casts_in_every_call():
    graph, _ = product(weights=Weights.CAST)
    before = str(graph)
    Cache(inputs=INPUTS).apply(graph)
    assert str(graph) == before
