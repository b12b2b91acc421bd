"""Code that reads submodules of a block from the stack, variables or arguments: names and decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING
from test_left_to_python import WIDTH, batch, step
from torch import Tensor, nn
from ways import front_door, report_of_all, whole

from mxcompile.report.data.record import NOT_COMPILED

pytestmark = pytest.mark.usefixtures("messages")
Forward = Callable[["Block", Tensor], Tensor]


@torch._dynamo.disable
def broken(x: Tensor) -> Tensor:
    return x


class Block(Made, first=(WIDTH, WIDTH), inner=(WIDTH, WIDTH, False), last=(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def stack(block: Block, x: Tensor) -> Tensor:
    """At the break, two submodules are on the stack; the second has more parameters."""
    return block.last(block.inner(broken(block.first(x))))


def stack_and_variable(block: Block, x: Tensor) -> Tensor:
    return block.last(block.inner(broken(x))) + block.first(x)


def variables(block: Block, x: Tensor) -> Tensor:
    inner, last = block.inner, block.last
    x = broken(block.first(x))
    return last(inner(x))


class Stack(nn.Module):
    """Three blocks in a row. The head is for subclasses."""

    def __init__(self, compute: Forward) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(compute=compute) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def whole_block(block: Block, x: Tensor) -> Tensor:
    return block.last(block.inner(block.first(x)))


class Method(Stack):
    """A method whose code reads a block and the head, which all blocks share, from the stack."""

    def run(self, index: int, x: Tensor) -> Tensor:
        return self.head(self.blocks[index](broken(x)))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)):
            x = broken(self.run(index, x))
        return x


def run(block: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    return head(block(x))


class Arguments(Method):
    """A function whose arguments are a block and the head."""

    def run(self, index: int, x: Tensor) -> Tensor:
        return run(self.blocks[index], self.head, broken(x))


MODELS = {
    "stack": lambda: Stack(stack),
    "stack_and_variable": lambda: Stack(stack_and_variable),
    "variables": lambda: Stack(variables),
    "method": lambda: Method(whole_block),
    "arguments": lambda: Arguments(whole_block),
}


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
@pytest.mark.parametrize("make", MODELS)
def test_layers_have_their_names_and_decisions(make: str, way: Any, messages: Any):
    kept = {"match": {"name": "blocks.1.inner"}, "use": "bf16"}
    policy = {"version": 1, "rules": [kept, *EVERYTHING["rules"]]}
    step(way(MODELS[make](), policy=policy, strict=True), batch())
    assert messages() == []
    gemms = [gemm for gemm in report_of_all().gemms if gemm.kernel != NOT_COMPILED]
    layers = {f"blocks.{index}.{name}" for index in range(3) for name in ("first", "inner", "last")}
    assert {gemm.name for gemm in gemms} - {"head"} == layers
    assert {gemm.name for gemm in gemms if gemm.precision == "bf16"} == {"blocks.1.inner"}
    number = sum(gemm.gemm == "fprop" and gemm.name != "head" for gemm in gemms)
    assert number == len(layers), "each layer once"
