"""`grad_rounding: stochastic`: compiled gradients are those of the reference, reproducible, and unbiased."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.casts import values
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mxcompile

PRECISIONS = [
    {"precision": "mxfp8"},
    pytest.param({"precision": "fp8", "grad_dtype": "e5m2"}, marks=pytest.mark.slow),
    pytest.param({"precision": "fp8", "scaling": "channel"}, marks=pytest.mark.slow),
    pytest.param({"precision": "mxfp4"}, marks=pytest.mark.slow),
]


def policy(use: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": 1,
        "rules": [{"match": {"name": "*"}, "use": {**use, "grad_rounding": "stochastic"}}],
    }


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(40, 72), nn.Linear(72, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def gradients(model: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    loss = model(x).square().mean()
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.ndim > 1]))


@pytest.mark.parametrize("use", PRECISIONS, ids=str)
def test_compiled_gradients_are_those_of_the_reference(use: dict[str, Any]):
    x = torch.randn(50, 40)
    model = Mlp()
    compiled = torch.compile(model, backend="mxfp8", options={"policy": policy(use)}, fullgraph=True)
    gradient = gradients(compiled, x, 1)
    for value, repeated in zip(gradient, gradients(compiled, x, 1), strict=True):
        assert torch.equal(value, repeated)
    for value, other in zip(gradient, gradients(compiled, x, 2), strict=True):
        assert not torch.equal(value, other)
    torch._dynamo.reset()
    reference = torch.compile(model, backend=EagerBackend(policy=policy(use)))
    for value, expected in zip(gradient, gradients(reference, x, 1), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    stochastic = {
        f.operand for g in mxcompile.reports()[-1].gemms for f in g.formats if f.elements == "stochastic"
    }
    assert stochastic == {"dy"}


def test_mean_of_stochastic_gradients_is_unbiased():
    """Of a single layer, so that nothing but dy's cast is random: the mean of n runs errs less by √n."""
    model, x = nn.Linear(40, 24, bias=False), torch.randn(64, 40)
    use = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "mxfp8"}
    compiled = torch.compile(model, backend="mxfp8", options={"policy": policy(use)})
    nearest = {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}
    dy = torch.randn(64, 24)
    codes = values(x, -2, torch.float8_e4m3fn, "rceil", False, torch.float32)
    exact = dy.double().t() @ codes.double()

    def grad(seed: int) -> Tensor:
        torch.manual_seed(seed)
        (gradient,) = torch.autograd.grad(compiled(x), [model.weight], dy)
        return gradient.double() - exact

    errors = [grad(seed) for seed in range(144)]
    assert (sum(errors) / 144).norm() < 1.2 * errors[0].norm() / 12
    compiled = torch.compile(model, backend="mxfp8", options={"policy": nearest})
    assert grad(0).norm() > 4 * errors[0].norm() / 12


@pytest.mark.slow
def test_nothing_compiles_again_and_nothing_breaks():
    counter = CompileCounterWithBackend("mxfp8")
    model = Mlp()
    backend = mxcompile.Backend(policy=policy({"precision": "fp8"}), root=model)

    def count(gm: Any, inputs: Any) -> Any:
        counter.frame_count += 1
        return backend(gm, inputs)

    compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
    for tokens in (50, 33, 96):
        assert all(g.isfinite().all() for g in gradients(compiled, torch.randn(tokens, 40), 0))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_recomputed_layer_reads_the_same_random_numbers():
    class Checkpointed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(50, 40)
    options = {"policy": policy({"precision": "fp8", "grad_dtype": "e5m2"})}
    plain = gradients(torch.compile(Mlp(), backend="mxfp8", options=options), x, 3)
    recomputed = gradients(torch.compile(Checkpointed(), backend="mxfp8", options=options), x, 3)
    for gradient, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
