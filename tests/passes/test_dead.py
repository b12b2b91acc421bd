"""What is erased of a graph is what Torch would erase."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile.graph import dead

aten = torch.ops.aten


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() + y, lambda y: y.cos(), (x,))


def traced(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """`function` with dead nodes: a chain of pure ones, one that draws random numbers, one that asserts."""
    module = make_fx(function, tracing_mode="fake")(torch.ones(4))
    graph = module.graph
    (x,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(x):
        first = graph.call_function(aten.sin.default, (x,))
    with graph.inserting_after(first):
        second = graph.call_function(aten.add.Tensor, (first, x))
    with graph.inserting_after(second):
        graph.call_function(aten.rand_like.default, (second,))
        graph.call_function(aten._assert_async.msg, (x, "x"))
    return module


def test_pure_nodes_without_readers_are_erased():
    for function in (torch.cos, branches):
        ours, expected = traced(function), traced(function)
        for module in (ours, expected):
            for child in module.children():
                assert isinstance(child, fx.GraphModule)
                with child.graph.inserting_before(child.graph.output_node()):
                    child.graph.call_function(
                        aten.tan.default, tuple(child.graph.find_nodes(op="placeholder"))
                    )
        dead.eliminate(ours.graph)
        expected.graph.eliminate_dead_code()
        assert str(ours.graph) == str(expected.graph)
        assert [*map(str, ours.children())] == [*map(str, expected.children())]
        assert not any("tan" in str(child) for child in ours.children())


def test_random_numbers_are_erased_while_compiling():
    module = traced(torch.cos)
    with torch._guards.tracing(torch._guards.TracingContext(torch._subclasses.FakeTensorMode())):
        dead.eliminate(module.graph)
    text = str(module.graph)
    assert "rand_like" not in text
    assert "sin" not in text
    assert "_assert_async" in text
