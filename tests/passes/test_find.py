"""The pass `find` on forward and backward of a layer: which products it ties together, and their sizes."""

from __future__ import annotations

from by_hand import Hand, tag
from torch import fx

from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import GemmTag, Kind
from mxcompile.models.names import GraphInput
from mxcompile.passes.find import Find
from mxcompile.policy import Gemm

INPUTS = GraphInput(), GraphInput(path="model.layers.0.up.weight", static=True)
ROWS, N, K = 5, 6, 7


def layer(*, numbered: bool = True) -> list[fx.Node]:
    """y = x·wᵀ of the module ``up``, dx = dy·w and dw = dyᵀ·x; numbered: as autograd numbers them."""
    hand = Hand()
    x, w, dy = hand.input("x", ROWS, K), hand.input("w", N, K), hand.input("tangents_1", ROWS, N)
    y = hand.call(aten.mm.default, x, hand.call(aten.permute.default, w, [1, 0]))
    y.meta["nn_module_stack"] = {"": ("model.layers.0.up", "torch.nn.modules.linear.Linear")}
    dx = hand.call(aten.mm.default, dy, w)
    dw = hand.call(aten.mm.default, hand.call(aten.permute.default, dy, [1, 0]), x)
    for node in (y, dx, dw):
        node.meta |= {"seq_nr": 3} if numbered else {}
    Find(inputs=INPUTS).apply(hand.output(y, dx, dw))
    return [y, dx, dw]


def tags(nodes: list[fx.Node]) -> list[GemmTag]:
    return [tag(node) for node in nodes]


def test_the_three_products_of_a_layer():
    for nodes in (layer(), layer(numbered=False)):
        gemm_tags = tags(nodes)
        assert [(tag.gemm, tag.tensors, tag.m, tag.n, tag.k) for tag in gemm_tags] == [
            (Gemm.FPROP, ("x", "w"), ROWS, N, K),
            (Gemm.DGRAD, ("dy", "w"), ROWS, K, N),
            (Gemm.WGRAD, ("dy", "x"), N, K, ROWS),
        ]
        assert {(tag.name, tag.module, tag.layer, tag.kind) for tag in gemm_tags} == {
            ("model.layers.0.up", "Linear", nodes[0].name, Kind.LINEAR)
        }
        assert [tag.index for tag in gemm_tags] == [0, 1, 2]


def test_product_of_two_activations_is_not_a_layer():
    hand = Hand()
    x, y = hand.input("x", ROWS, K), hand.input("y", K, N)
    product = hand.call(aten.mm.default, x, y)
    Find(inputs=(GraphInput(), GraphInput())).apply(hand.output(product))
    assert [(tag.kind, tag.tensors) for tag in tags([product])] == [(Kind.PRODUCT, ("x", "x"))]


def test_a_gradient_of_a_weight_that_no_forward_reads_is_its_dgrad():
    hand = Hand()
    dy, w, x = hand.input("tangents_1", ROWS, N), hand.input("w", N, K), hand.input("x", ROWS, K)
    dx = hand.call(aten.mm.default, dy, w)
    dw = hand.call(aten.mm.default, hand.call(aten.permute.default, dy, [1, 0]), x)
    inputs = GraphInput(), GraphInput(path="up.weight", static=True), GraphInput()
    Find(inputs=inputs).apply(hand.output(dx, dw))
    assert [(tag.name, tag.kind, tag.gemm, tag.tensors) for tag in tags([dx, dw])] == [
        ("up", Kind.LINEAR, Gemm.DGRAD, ("dy", "w")),
        ("up", Kind.LINEAR, Gemm.WGRAD, ("dy", "x")),
    ]
    layers = [tag.as_layer() for tag in tags([dx, dw])]
    assert [(layer.m, layer.n, layer.k) for layer in layers] == [(ROWS, N, K)] * 2


def test_a_gradient_without_a_forward_and_a_weight_is_a_product_that_stays():
    hand = Hand()
    dy, x = hand.input("tangents_1", ROWS, K), hand.input("x", K, N)
    product = hand.call(aten.mm.default, dy, x)
    Find(inputs=(GraphInput(), GraphInput())).apply(hand.output(product))
    assert [(tag.kind, tag.gemm) for tag in tags([product])] == [(Kind.PRODUCT, Gemm.DGRAD)]
