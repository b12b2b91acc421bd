"""Small models with one fault each, and what a watch is to say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import watched_models
from torch import Tensor, nn
from torch.nn import functional as F

FAULTY = 1
"""The block with the fault."""


class Block(watched_models.Block):
    """spike: added to the first input feature of `down`. factors: of the gradient of its result, by token."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spike", torch.zeros(1))
        self.register_buffer("factors", torch.ones(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        y = self.down(torch.cat([y[:, :1] + self.spike, y[:, 1:]], 1))
        return x + y.detach() + self.factors * (y - y.detach())


class Model(nn.Module):
    """number: of blocks."""

    def __init__(self, number: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(number)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """inject: puts it into the block. rule: finds it. places: layer, GEMM and operand of what is found."""

    inject: Callable[[Block], None] = lambda block: None
    rule: dict[str, Any]
    places: frozenset[tuple[str, str, str]]


def broken(block: Block) -> None:
    block.up.weight.data[3, 5] = math.inf


def outlier(block: Block) -> None:
    block.spike.fill_(1e6)


def vanishing(block: Block) -> None:
    """Of every two tokens one has a gradient that is lost in a block along tokens."""
    block.factors[::2] = 1e-6


def places(layer: str, *operands: tuple[str, str]) -> frozenset[tuple[str, str, str]]:
    return frozenset((f"blocks.{FAULTY}.{layer}", *operand) for operand in operands)


WEIGHT = ("fprop", "w"), ("dgrad", "w")
FAULTS = {
    "inf": Fault(inject=broken, rule={"when": {"inf": "> 0"}, "operand": "w"}, places=places("up", *WEIGHT)),
    "outlier": Fault(
        inject=outlier,
        rule={"when": {"amax": "> 1e5"}, "operand": "x"},
        places=places("down", ("fprop", "x"), ("wgrad", "x")),
    ),
    "underflow": Fault(
        inject=vanishing,
        rule={"when": {"underflow": "> 0.4"}, "operand": "dy"},
        places=places("down", ("wgrad", "dy")) | places("up", ("wgrad", "dy")),
    ),
    "stuck": Fault(
        rule={"when": {"changed": "<= 0", "over": 2}, "operand": "w"}, places=places("up", *WEIGHT)
    ),
}


def trained(model: nn.Module, fault: str) -> list[nn.Parameter]:
    """The parameters of `model` that an optimizer is to change."""
    stuck = f"blocks.{FAULTY}.up.weight" if fault == "stuck" else ""
    return [parameter for name, parameter in model.named_parameters() if name != stuck]
