"""What Torch's lint finds in a graph is found between passes too, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from mxcompile.errors import VerificationError
from mxcompile.graph import sound


class Sum(nn.Module):
    """A graph with inputs, an attribute, calls and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("weight", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [4]."""
        return operator.sub(operator.add(x, self.inner.weight), x)


def graph() -> fx.Graph:
    return fx.symbolic_trace(Sum()).graph


def node(graph: fx.Graph, op: str, index: int = 0) -> fx.Node:
    return [candidate for candidate in graph.nodes if candidate.op == op][index]


def late(graph: fx.Graph) -> None:
    graph.output_node().prepend(node(graph, "get_attr"))


def of_another(graph: fx.Graph) -> None:
    other = fx.symbolic_trace(Sum()).graph
    node(graph, "call_function").args = (node(other, "placeholder"), 1)
    graph.other = other  # type: ignore[attr-defined]


def erased(graph: fx.Graph) -> None:
    wrong = node(graph, "call_function")
    graph.find_nodes(op="call_function", target=operator.sub)[0].args = ()
    graph.erase_node(wrong)
    graph.find_nodes(op="call_function", target=operator.sub)[0].args = (wrong, 1)


def unfiled(graph: fx.Graph) -> None:
    graph._find_nodes_lookup_table.remove(node(graph, "call_function"))


def named_twice(graph: fx.Graph) -> None:
    node(graph, "call_function").name = node(graph, "call_function", 1).name


def no_function(graph: fx.Graph) -> None:
    node(graph, "call_function").target = "add"


def no_word(graph: fx.Graph) -> None:
    node(graph, "placeholder").target = operator.add


def no_attribute(graph: fx.Graph) -> None:
    node(graph, "get_attr").target = "inner.bias"


def no_operation(graph: fx.Graph) -> None:
    node(graph, "placeholder").op = "place"


FAULTS: list[Callable[[fx.Graph], None]] = [
    late, of_another, erased, unfiled, named_twice, no_function, no_word, no_attribute, no_operation,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_soundness_check_raises_the_error_of_graph_lint(fault: Callable[[fx.Graph], None]):
    broken = graph()
    fault(broken)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        broken.lint()
    with pytest.raises(VerificationError) as raised:
        sound.check(broken, "test")
    assert str(raised.value) == f"after test: {expected.value}"


def test_lint_is_not_called_for_a_sound_graph(monkeypatch: pytest.MonkeyPatch):
    called: list[Any] = []
    monkeypatch.setattr(fx.Graph, "lint", called.append)
    sound.check(graph(), "test")
    assert not called


def test_lint_judges_a_graph_that_calls_modules():
    model = nn.Sequential(nn.ReLU())
    traced = fx.symbolic_trace(model).graph
    sound.check(traced, "test")
    node(traced, "call_module").target = "1"
    with pytest.raises(VerificationError, match="nonexistent"):
        sound.check(traced, "test")
