"""Casts that the model writes itself are part of what it computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import EVERYTHING
from torch import Tensor, nn

NARROW = [torch.bfloat16, torch.float16]


class Narrowed(Made, fc=(64, 48)):
    """A linear layer with a cast to `dtype` and back before it, or behind it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            return self.fc(self._cast(x))
        return self._cast(self.fc(x))

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()


def run(model: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of a step in MXFP8 whose loss is a weighted sum."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    y = torch.compile(model, backend=EagerBackend(policy=EVERYTHING))(x)
    return y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])


@pytest.mark.parametrize("dtype", NARROW)
def test_a_cast_before_a_layer_rounds_its_input(dtype):
    model = Narrowed(dtype=dtype, where="before")
    x, weights = torch.randn(40, 64), torch.randn(40, 48)
    results = run(model, x, weights)
    expected = run(model.fc, x.to(dtype).float(), weights)
    assert torch.equal(results[0], expected[0])
    for got, wanted in zip(results[2:], expected[2:], strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(results[1], expected[1].to(dtype).float())


@pytest.mark.parametrize("dtype", NARROW)
def test_a_cast_behind_a_layer_rounds_its_gradient(dtype):
    model = Narrowed(dtype=dtype, where="behind")
    x, weights = torch.randn(40, 64), torch.randn(40, 48)
    results = run(model, x, weights)
    for got, wanted in zip(results[1:], run(model.fc, x, weights.to(dtype).float())[1:], strict=True):
        assert torch.equal(got, wanted)


def test_overflow_in_a_cast_of_the_model_stays_nonfinite():
    model = Narrowed(dtype=torch.float16, where="before")
    x = torch.full((32, 64), 98304.0)
    with torch.no_grad():
        assert not torch.compile(model, backend=EagerBackend(policy=EVERYTHING))(x).isfinite().any()


def test_casts_of_the_model_count_under_autocast_too():
    model = Narrowed(dtype=torch.bfloat16, where="before")
    x = torch.randn(40, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = torch.compile(model, backend=EagerBackend(policy=EVERYTHING))(x)
        expected = torch.compile(model.fc, backend=EagerBackend(policy=EVERYTHING))(x.bfloat16().float())
    assert torch.equal(output, expected)
