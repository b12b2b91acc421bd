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
        return operator.sub(operator.add(x, self.inner.weight), x)


def graph() -> fx.Graph:
    return fx.symbolic_trace(Sum()).graph


def node(graph: fx.Graph, op: str, index: int = 0) -> fx.Node:
    return [candidate for candidate in graph.nodes if candidate.op == op][index]


def of_another(graph: fx.Graph) -> None:
    other = fx.symbolic_trace(Sum()).graph
    node(graph, "call_function").args = (node(other, "placeholder"), 1)
    graph.other = other  # type: ignore[attr-defined]


def erased(graph: fx.Graph) -> None:
    wrong = node(graph, "call_function")
    graph.find_nodes(op="call_function", target=operator.sub)[0].args = ()
    graph.erase_node(wrong)
    graph.find_nodes(op="call_function", target=operator.sub)[0].args = (wrong, 1)


def changed(op: str, /, **values: Any) -> Callable[[fx.Graph], None]:
    """The fault that the first node of a kind has these attributes."""
    return lambda graph: [setattr(node(graph, op), name, value) for name, value in values.items()]


FAULTS: dict[str, Callable[[fx.Graph], Any]] = {
    "a node behind its reader": lambda graph: graph.output_node().prepend(node(graph, "get_attr")),
    "a node of another graph": of_another,
    "an erased node": erased,
    "a node that is not filed": lambda graph: graph._find_nodes_lookup_table.remove(
        node(graph, "call_function")
    ),
    "a name twice": changed("call_function", name="sub"),
    "no function": changed("call_function", target="add"),
    "no word": changed("placeholder", target=operator.add),
    "no attribute": changed("get_attr", target="inner.bias"),
    "no operation": changed("placeholder", op="place"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_soundness_check_raises_the_error_of_graph_lint(fault: str):
    broken = graph()
    FAULTS[fault](broken)
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
    traced = fx.symbolic_trace(nn.Sequential(nn.ReLU())).graph
    sound.check(traced, "test")
    node(traced, "call_module").target = "1"
    with pytest.raises(VerificationError, match="nonexistent"):
        sound.check(traced, "test")
