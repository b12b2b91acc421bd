"""Optimizers with quantized states, and Muon, compose with the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from torch import Tensor, nn
from torch.optim import Optimizer

import mxcompile

pytestmark = pytest.mark.slow
STEPS = 4
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW8bit": lambda model: by_torchao("AdamW8bit", model),
    "AdamW4bit": lambda model: by_torchao("AdamW4bit", model),
    "AdamWFp8": lambda model: by_torchao("AdamWFp8", model),
    "Muon": lambda model: torch.optim.Muon(matrices_of(model), lr=0.02),
}


class Block(Made, norm=lambda: nn.LayerNorm(64), up=(64, 128, False), down=(128, 64, False)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def by_torchao(name: str, model: nn.Module) -> Optimizer:
    optimizers = pytest.importorskip("torchao.optim", exc_type=ImportError)
    return getattr(optimizers, name)(matrices_of(model), lr=0.01, block_size=64)


def build() -> nn.Module:
    torch._dynamo.reset()
    mxcompile.clear_reports()
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def trained(model: nn.Module, call: Any, step: Callable[[], object]) -> tuple[list[float], Tensor]:
    """Returns the losses, and all matrices at the end."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    losses = []
    for _ in range(STEPS):
        loss = (call(x) - y).square().mean()
        loss.backward()
        step()
        model.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([matrix.detach().flatten() for matrix in matrices_of(model)])


@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_moves_weights_as_with_the_passes_alone(name: str):
    model = build()
    call = torch.compile(model, backend="mxfp8", options={"strict": True})
    losses, weights = trained(model, call, MAKERS[name](model).step)
    (report,) = mxcompile.reports()
    assert (len(report.gemms), report.summary.flop_share) == (12, 1.0)
    assert losses == sorted(losses, reverse=True)
    model = build()
    expected, moved = trained(model, torch.compile(model, backend=EagerBackend()), MAKERS[name](model).step)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert (weights - moved).norm() < 1e-2 * (
        moved - torch.cat([m.flatten() for m in matrices_of(build())])
    ).norm()


def moved_by_compiled_muon(**compiler: Any) -> list[Tensor]:
    """Returns the matrices after one step of Muon, whose step function is compiled."""
    model = build()
    step = torch.compile(MAKERS["Muon"](model).step, **compiler)
    model(torch.randn(64, 64)).square().mean().backward()
    step()
    return [matrix.detach() for matrix in matrices_of(model)]


def test_products_of_a_compiled_muon_stay_as_inductor_has_them():
    policy = {"version": 1, "preset": "bf16", "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    matrices = moved_by_compiled_muon(backend="mxfp8", options={"policy": policy, "strict": True})
    (report,) = mxcompile.reports()
    assert {(gemm.role, gemm.precision) for gemm in report.gemms} == {("other", "bf16")}
    for matrix, expected in zip(matrices, moved_by_compiled_muon(backend="inductor"), strict=True):
        torch.testing.assert_close(matrix, expected, rtol=0, atol=0)
