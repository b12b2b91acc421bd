"""Dimensions followed back through views: against the indices that change in a tensor of numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mxcompile.graph.dims import before

SHAPE = (2, 3, 4, 1, 5)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(4, 0, 3, 2, 1),
    "merge": lambda x: x.reshape(6, 4, 5),
    "split": lambda x: x.view(2, 3, 2, 2, 1, 5),
    "all": lambda x: x.reshape(-1),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "squeeze": lambda x: x.squeeze(3),
    "select": lambda x: x.select(1, 2),
    "slice": lambda x: x[:, :, 1:3],
    "expand": lambda x: x.expand(2, 3, 4, 7, 5),
    "mul": lambda x: x * 1,
}


def changing(view: Callable[[Tensor], Tensor], dim: int) -> set[int]:
    """The dimensions of the source whose index changes along `dim` of the view."""
    numbers = view(torch.arange(torch.Size(SHAPE).numel()).view(SHAPE)).movedim(dim, 0)
    numbers = numbers.reshape(len(numbers), -1)
    indices = np.array(np.unravel_index(numbers.numpy(), SHAPE))
    return {index for index in range(len(SHAPE)) if (indices[index] != indices[index][:1]).any()}


@pytest.mark.parametrize("name", VIEWS)
def test_a_dimension_is_made_of_those_whose_index_changes_along_it(name: str) -> None:
    with FakeTensorMode():
        graph = make_fx(VIEWS[name])(torch.empty(SHAPE)).graph
    node = next(iter(graph.find_nodes(op="output"))).args[0]
    source = node.all_input_nodes[0]
    assert len([n for n in graph.nodes if n.op == "call_function"]) == 1
    for dim, size in enumerate(node.meta["val"].shape):
        dims = before(node, source, frozenset({dim}))
        assert {index for index in dims if SHAPE[index] > 1} == changing(VIEWS[name], dim) or size == 1
