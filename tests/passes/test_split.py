"""The passes `split` and `restore` on the gradients of a convolution: apart, and one node again."""

from __future__ import annotations

import operator

import pytest
import torch
from by_hand import Hand, calls, run
from torch import fx

from mxcompile.graph.opsets import aten
from mxcompile.passes.restore import Restore
from mxcompile.passes.split import Split

BACKWARD = aten.convolution_backward.default


def gradients(*read: int) -> fx.Graph:
    """A graph that computes the three gradients of a convolution and returns those of `read`."""
    hand = Hand()
    dy, x, w = hand.input("dy", 2, 4, 3, 3), hand.input("x", 2, 3, 5, 5), hand.input("w", 4, 3, 3, 3)
    rest = [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    several = hand.call(BACKWARD, dy, x, w, *rest)
    return hand.output(*(hand.call(operator.getitem, several, index) for index in read))


VALUES = torch.randn(2, 4, 3, 3), torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)


@pytest.mark.parametrize("read", [(0, 1, 2), (1,), (2, 0)])
def test_every_gradient_that_is_read_is_a_node(read: tuple[int, ...]):
    graph = gradients(*read)
    expected = run(gradients(*read), *VALUES)
    Split().apply(graph)
    masks = [node.args[-1] for node in calls(graph, BACKWARD)]
    assert masks == [[number == index for number in range(3)] for index in sorted(read)]
    for result, whole in zip(run(graph, *VALUES), expected, strict=True):
        torch.testing.assert_close(result, whole)


def test_one_node_again_if_all_stay():
    graph, before = gradients(0, 1, 2), gradients(0, 1, 2)
    Split().apply(graph)
    Restore().apply(graph)
    (node,), (first,) = calls(graph, BACKWARD), calls(before, BACKWARD)
    assert node.args[-1] == first.args[-1]
    assert [user.args[1] for user in node.users] == [0, 1, 2]
    for result, whole in zip(run(graph, *VALUES), run(before, *VALUES), strict=True):
        assert torch.equal(result, whole)


def test_a_bias_alone_becomes_a_sum():
    """The other two gradients are gone, as after a rewrite."""
    graph = gradients(2, 1)
    Split().apply(graph)
    weight, bias = calls(graph, BACKWARD)
    assert weight.args[-1] == [False, True, False]
    assert bias.args[-1] == [False, False, True]
    (item,) = weight.users
    item.replace_all_uses_with(next(iter(graph.nodes)))
    graph.erase_node(item)
    graph.erase_node(weight)
    Restore().apply(graph)
    assert not calls(graph, BACKWARD)
    torch.testing.assert_close(run(graph, *VALUES)[0], VALUES[0].sum((0, 2, 3)))
