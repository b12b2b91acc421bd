"""`torch.amp.GradScaler` and accumulation over micro-batches, with gradients in E5M2 and in E4M3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn

GRADIENTS = ["e5m2", "e4m3"]


def compiled(grad_dtype: str, **use: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 24))
    use = {"precision": "mxfp8", "grad_dtype": grad_dtype, **use}
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}
    torch._dynamo.reset()
    return model, torch.compile(model, backend=EagerBackend(policy=policy))


def loss(call: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call(x).float().square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("use", [{}, {"precision": "fp8"}], ids=["mxfp8", "fp8"])
@pytest.mark.parametrize("grad_dtype", GRADIENTS)
def test_a_scaled_loss_gives_the_same_gradients(grad_dtype: str, use: dict[str, str]):
    """A power of two passes through every scale, so that what is unscaled again has the same bits."""
    model, call = compiled(grad_dtype, **use)
    x = torch.randn(32, 40)
    loss(call, x).backward()
    expected = gradients(model)
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss(call, x)).backward()
    assert not torch.equal(model[0].weight.grad, expected[0])
    scaler.unscale_(optimizer)
    for gradient, expected_gradient in zip(gradients(model), expected, strict=True):
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("grad_dtype", GRADIENTS)
def test_a_step_that_overflows_is_left_out_and_the_scale_halved(grad_dtype: str):
    model, call = compiled(grad_dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 40)
    x[3, 4] = torch.inf
    for inputs, moved in ((x, False), (torch.randn(32, 40), True)):
        optimizer.zero_grad()
        scaler.scale(loss(call, inputs)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(changed) if moved else not any(changed)


@pytest.mark.parametrize("grad_dtype", GRADIENTS)
def test_micro_batches_add_up_in_fp32(grad_dtype: str):
    model, call = compiled(grad_dtype)
    batches = torch.randn(4, 16, 40)
    apart = []
    for x in batches:
        model.zero_grad()
        loss(call, x).backward()
        apart.append(gradients(model))
    model.zero_grad()
    for x in batches:
        loss(call, x).backward()
    for index, gradient in enumerate(gradients(model)):
        assert gradient.dtype is torch.float32
        exact = sum(gradients_of_part[index].double() for gradients_of_part in apart)
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-6, atol=1e-7 * float(exact.abs().max()))
