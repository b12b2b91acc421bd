"""Graphs written node by node, with fake values: what a pass reads, without `torch.compile`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers.casts import mx
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mxcompile import ops
from mxcompile.graph.tags import GemmTag, Kind, set_tag, tag_of
from mxcompile.policy import Gemm


@dataclass
class Position:
    """What AOTAutograd says of an input: its place among those of the captured graph."""

    idx: int


class Hand:
    """One graph that is being written. Several have the fake tensors of one mode if they are given it."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.graph = fx.Graph()
        self._places = itertools.count()
        self.mode = mode or FakeTensorMode(shape_env=ShapeEnv())

    def input(
        self, name: str, *shape: int, dtype: torch.dtype = torch.float32, symbolic: Sequence[int] = ()
    ) -> fx.Node:
        """A placeholder. symbolic: dimensions whose length is a symbol, with the hint that `shape` says."""
        node = self.graph.placeholder(name)
        kinds = [DimDynamic.DYNAMIC if dim in symbolic else DimDynamic.STATIC for dim in range(len(shape))]
        context = StatelessSymbolicContext(dynamic_sizes=kinds)
        node.meta["desc"] = Position(next(self._places))
        node.meta["val"] = self.mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def end(self, saved: fx.Node) -> fx.Node:
        """A placeholder for what another graph gives back as `saved`."""
        node = self.graph.placeholder(saved.name)
        node.meta["val"] = saved.meta["val"]
        return node

    def parts(self, cast: fx.Node) -> list[fx.Node]:
        """Elements and scales of a cast."""
        return [self.call(operator.getitem, cast, index) for index in (0, 1)]

    def quantize(self, x: fx.Node, dim: int, *how: Any) -> fx.Node:
        """A cast of `x` to MXFP8 along `dim`."""
        rank = x.meta["val"].ndim
        return self.call(ops.cast, x, mx(dim % rank - rank, *how))

    def gemm(self, target: Any, *args: Any, kind: Kind = Kind.LINEAR, **facts: Any) -> fx.Node:
        """A call that is a GEMM. facts: of its tag; its layer is itself unless they say another."""
        node = self.call(target, *args)
        defaults: dict[str, Any] = {"layer": node.name, "name": node.name, "module": "Linear", "source": ""}
        defaults |= {"gemm": Gemm.FPROP, "kind": kind, "tensors": ("x", "w")}
        set_tag(node, GemmTag(**(defaults | facts)))
        return node

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph


def tag(node: fx.Node) -> GemmTag:
    result = tag_of(node)
    assert result is not None
    return result


def assert_unchanged(graph_pass: Any, graph: fx.Graph) -> None:
    before = str(graph)
    graph_pass.apply(graph)
    assert str(graph) == before


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same normal numbers for a shape at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run(graph: fx.Graph, *values: Tensor) -> tuple[Any, ...]:
    """What `graph` computes of `values`."""
    graph.lint()
    return fx.GraphModule(nn.Module(), graph)(*values)


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [*graph.find_nodes(op="call_function", target=target)]
