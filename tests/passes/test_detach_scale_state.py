"""The pass `detach_scale_state` on a graph with one tapped weight."""

from __future__ import annotations

import operator

from by_hand import Hand, assert_unchanged, calls

from mxcompile import ops
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import STATE_KEY
from mxcompile.passes.delayed_scales import FORWARD
from mxcompile.passes.detach_scale_state import DetachScaleState


def test_products_read_the_weight_and_slots_the_state():
    hand = Hand()
    x, w, state = hand.input("x", 4, 8), hand.input("w", 8, 6), hand.input("state", 3)
    tapped = hand.call(ops.tapped, w, state)
    product = hand.call(aten.mm.default, x, hand.call(operator.getitem, tapped, 0))
    graph = hand.output(product, hand.call(operator.getitem, tapped, 1))
    DetachScaleState().apply(graph)
    graph.lint()
    (slot,) = calls(graph, ops.slot)
    assert product.args == (x, w)
    assert (slot.args, slot.meta[FORWARD], slot.meta["val"].shape) == ((state,), True, (3,))
    assert graph.output_node().args == ((product, slot),)
    assert w.meta[STATE_KEY] is state
    assert not calls(graph, ops.tapped)


def test_a_graph_without_taps_stays():
    hand = Hand()
    graph = hand.output(hand.call(aten.mm.default, hand.input("x", 4, 8), hand.input("w", 8, 6)))
    assert_unchanged(DetachScaleState(), graph)
