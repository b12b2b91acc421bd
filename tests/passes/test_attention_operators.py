"""Attention operators are known by rows of one table: which they are, where q, k and v are, and the sizes."""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand

from mxcompile.graph.attention import _ROWS, ATTENTION_FORWARD, ATTENTIONS
from mxcompile.graph.shapes import attention_sizes, qkv

aten = torch.ops.aten


def name(operator) -> str:
    return str(operator).rpartition(".")[2]


def test_this_torch_has_every_operator_of_the_table():
    assert [row.name for row in _ROWS if row.forward is None] == []
    without = {row.name for row in _ROWS if row.backward is None}
    assert without == {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}


@pytest.mark.parametrize(
    "operator", [operator for operator, row in ATTENTIONS.items() if row.library is aten], ids=name
)
def test_q_k_and_v_are_the_arguments_that_the_schema_names_so(operator):
    overload = getattr(operator, operator.overloads()[0])
    hand = Hand()
    inputs = tuple(hand.graph.placeholder(argument.name) for argument in overload._schema.arguments)
    operands = qkv(hand.graph.call_function(overload, inputs))
    assert [node.target for node in operands] == ["query", "key", "value"]


@pytest.mark.parametrize("operator", ATTENTION_FORWARD, ids=name)
def test_sizes_count_tokens_and_heads_apart(operator):
    tokens_first = operator in (aten._flash_attention_forward, aten._efficient_attention_forward)
    hand = Hand()

    def tensor(which: str, tokens: int, width: int):
        return hand.input(which, 2, *((tokens, 3) if tokens_first else (3, tokens)), width)

    q, k, v = tensor("q", 5, 8), tensor("k", 7, 8), tensor("v", 7, 4)
    node = hand.graph.call_function(getattr(operator, "default", operator), (q, k, v))
    assert attention_sizes(node) == [(6, 5, 7, 8), (6, 5, 4, 7)]


def test_backward_of_flex_attention_starts_with_q():
    hand = Hand()
    q, k, v = (hand.input(which, 2, 3, 5, 8) for which in "qkv")
    node = hand.graph.call_function(torch.ops.higher_order.flex_attention_backward, (q, k, v))
    assert attention_sizes(node) == [(6, 5, 8, 5), (6, 5, 8, 5), (6, 5, 5, 8), (6, 8, 5, 5)]
