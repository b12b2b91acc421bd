"""The pass `decide`: formats of both operands from the policy, and why a product has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import Hand, tag
from helpers.one_linear import policy
from helpers.reports import EVERYTHING
from torch import fx

from mxcompile.errors import UnsupportedError
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import Kind
from mxcompile.passes.decide import Decide
from mxcompile.policy import Gemm, Policy, Role

EVERY = Policy.from_dict(EVERYTHING)


def product(dtype: torch.dtype = torch.float32, **facts: Any) -> tuple[fx.Graph, fx.Node]:
    hand = Hand()
    node = hand.gemm(
        aten.mm.default, hand.input("x", 4, 64, dtype=dtype), hand.input("w", 64, 64, dtype=dtype), **facts
    )
    return hand.output(node), node


def test_each_operand_has_the_format_of_its_tensor():
    use = {"precision": "mxfp8", "grad_dtype": "e5m2", "rounding": "floor"}
    for gemm, tensors, elems in [
        (Gemm.FPROP, ("x", "w"), ["e4m3", "e4m3"]),
        (Gemm.WGRAD, ("dy", "x"), ["e5m2", "e4m3"]),
        (Gemm.DGRAD, ("w", "dy"), ["e4m3", "e5m2"]),
    ]:
        graph, node = product(gemm=gemm, tensors=tensors)
        Decide(policy=Policy.from_dict(policy(use))).apply(graph)
        formats = tag(node).formats
        assert formats is not None
        assert [fmt.elem.name for fmt in formats] == elems
        assert {str(fmt.rounding) for fmt in formats} == {"floor"}
        assert str(tag(node).choice.reason) == "policy: rule 1"


@pytest.mark.parametrize("kind", [Kind.PRODUCT, Kind.ATTENTION])
def test_attention_product_stays_in_bf16_under_any_policy(kind: Kind):
    graph, node = product(kind=kind, role=Role.ATTN_SCORES)
    Decide(policy=EVERY).apply(graph)
    assert tag(node).formats is None
    assert str(tag(node).choice.reason) == "role attn_scores"


def test_a_dtype_that_is_not_cast_stays_with_the_reason_and_is_an_error_if_strict():
    graph, node = product(torch.float64, name="up")
    Decide(policy=EVERY).apply(graph)
    assert (tag(node).formats, tag(node).choice.precision) == (None, "bf16")
    assert "float64" in str(tag(node).choice.reason)
    with pytest.raises(UnsupportedError, match=r"up fprop: .*float64"):
        Decide(policy=EVERY, strict=True).apply(product(torch.float64, name="up")[0])


def test_reason_names_the_cut_only_where_whole_size_is_unknown():
    for whole, is_cut in [(None, True), ((64, 64), False)]:
        graph, node = product(whole=whole)
        Decide(policy=EVERY, cut="a graph break").apply(graph)
        assert ("a graph break" in str(tag(node).choice.reason)) is is_cut
