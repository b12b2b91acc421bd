"""Regions under ``nested_compile_region``: decisions, records, results and gradients of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.policies import policy, rule
from helpers.reports import EVERYTHING, report_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mxcompile

WIDTH = 64
POLICY = policy(rule("bf16", name="layers.1.*"), rule(name="*"))


class Inner(Made, fc=(WIDTH, WIDTH), norm=lambda: nn.BatchNorm1d(WIDTH)):
    """A layer with buffers that training changes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.fc(x)))


class Block(nn.Module):
    """A block with dropout, and two inner regions."""

    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = nn.ModuleList([inner(), inner()])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1, self.training))
        for part in self.inner:
            x = x + part(x)
        return x


class InnerRegion(Inner):
    forward = torch.compiler.nested_compile_region(Inner.forward)


class Region(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


class Model(nn.Module):
    """Three equal blocks, checkpointed or not."""

    def __init__(self, block: type[Block], inner: type[nn.Module], checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(inner) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 32)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def step(
    regions: bool, checkpoints: bool, training: bool, backend: Callable[..., Any]
) -> tuple[list[Any], list[Tensor]]:
    """Records, and what a step computes: the result, gradients and buffers."""
    forget()
    torch.manual_seed(0)
    block, inner = (Region, InnerRegion) if regions else (Block, Inner)
    model = Model(block, inner, checkpoints).train(training)
    x = torch.randn(40, WIDTH)
    with torch.set_grad_enabled(training):
        torch.manual_seed(1)
        y = torch.compile(model, backend=backend(policy=POLICY, strict=True), fullgraph=True)(x)
        if training:
            y.square().sum().backward()
    (report,) = mxcompile.reports()
    records = [(g.name, g.gemm, g.role, g.m, g.n, g.k, g.precision, g.reason) for g in report.gemms]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return records, [y.detach(), *gradients, *model.buffers()]


@pytest.mark.parametrize(
    ("checkpoints", "training", "backend"),
    [
        *((saves, trains, EagerBackend) for saves in (False, True) for trains in (False, True)),
        pytest.param(False, False, mxcompile.Backend, marks=pytest.mark.slow),
    ],
)
def test_region_has_the_records_and_results_of_the_plain_model(
    checkpoints: bool, training: bool, backend: Callable[..., Any]
) -> None:
    plain, values = step(False, checkpoints, training, backend)
    records, others = step(True, checkpoints, training, backend)
    assert records == plain
    assert {name for name, *_ in records} == {
        *(f"layers.{i}.{part}" for i in range(3) for part in ("up", "down", "inner.0.fc", "inner.1.fc")),
        "head",
    }
    assert len(values) == len(others)
    assert all(map(torch.equal, values, others))


def test_region_of_a_function_names_layers_by_their_weights() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w.t())

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return layer(layer(x, self.first), self.second)

    report = report_of(Flat(), torch.randn(40, WIDTH), training=False, policy=EVERYTHING, strict=True)
    assert [(gemm.name, gemm.precision) for gemm in report.gemms] == [("first", "mxfp8"), ("second", "mxfp8")]
