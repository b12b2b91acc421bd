"""Derivatives that compiled code takes itself: their products are gradients of layers, as autograd's are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.blocks import WIDTH, block
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.one_linear import policy
from helpers.reports import EVERYTHING, all_gemms, report_of
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import mxcompile

ONE_KIND = policy({"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "bf16"})
Params = dict[str, Tensor]


class WithLoss(nn.Module):
    """An embedding, two blocks, a head, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(97, WIDTH), block(), block(), nn.Linear(WIDTH, 97))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(tokens).flatten(0, 1), tokens.flatten())


def recorded(call: Callable[..., Any], *args: Any, policy: Any = "nvidia") -> list[tuple[Any, ...]]:
    """The records of `call`, compiled, in any order."""
    forget()
    out = torch.compile(call, backend=EagerBackend(policy=policy, strict=True), fullgraph=True)(*args)
    if isinstance(out, Tensor) and out.requires_grad:
        out.backward()
    return sorted((g.name, g.gemm, g.role, g.batch, g.m, g.n, g.k, g.precision) for g in all_gemms())


def functional(model: nn.Module) -> tuple[Params, Callable[[Params, Tensor], Tensor]]:
    """Weights of `model`, and `model` as a function of them and its input."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    return params, lambda weights, x: functional_call(model, weights, (x,))


@pytest.mark.parametrize("way", ["grad", "grad_and_value", "vjp"])
def test_train_step_by_torch_func_has_the_records_of_a_backward(way: str) -> None:
    model, tokens = WithLoss(), torch.randint(0, 97, (2, 20))
    params, loss = functional(model)
    ways: dict[str, Callable[[Params, Tensor], Any]] = {
        "grad": grad(loss),
        "grad_and_value": grad_and_value(loss),
        "vjp": lambda weights, tokens: vjp(lambda w: loss(w, tokens), weights)[1](torch.ones(())),
    }
    expected = recorded(model, tokens)
    assert Counter(gemm for _, gemm, *_ in expected)["wgrad"] == 15
    assert recorded(ways[way], params, tokens) == expected


class Mlp(Made, up=(64, 96), down=(96, 48)):
    """Two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_gradients_of_each_sample_are_gradients_of_layers() -> None:
    params, call = functional(Mlp())

    def loss(weights: Params, x: Tensor) -> Tensor:
        return call(weights, x).square().mean()

    records = recorded(vmap(grad(loss), (None, 0)), params, torch.randn(5, 8, 64), policy=ONE_KIND)
    assert [(name, gemm, precision) for name, gemm, *_, precision in records] == [
        ("down", "dgrad", "bf16"),
        ("down", "fprop", "mxfp8"),
        ("down", "wgrad", "bf16"),
        ("up", "fprop", "mxfp8"),
        ("up", "wgrad", "bf16"),
    ]


OF_LAST = {"version": 1, "rules": [{"match": {"name": "down"}, "use": "mxfp8"}]}


@pytest.mark.parametrize("way", ["grad", "each sample", "each model", "input"])
def test_layer_whose_value_nobody_reads_keeps_its_name_and_rule(way: str) -> None:
    """The gradients of a sum do not depend on the result of the last layer: PyTorch erases its forward."""
    params, model = functional(Mlp())
    stacks = {name: torch.stack([value, value + 1]) for name, value in params.items()}

    def loss(weights: Params, x: Tensor) -> Tensor:
        return model(weights, x).sum()

    ways: dict[str, tuple[Callable[..., Any], Params, tuple[int, ...]]] = {
        "grad": (grad(loss), params, (40, 64)),
        "each sample": (vmap(grad(loss), (None, 0)), params, (5, 8, 64)),
        "each model": (vmap(grad(loss), (0, None)), stacks, (40, 64)),
        "input": (grad(loss, 1), params, (40, 64)),
    }
    call, weights, shape = ways[way]
    results = recorded(call, weights, torch.randn(shape), policy=OF_LAST)
    assert [(gemm, precision) for name, gemm, *_, precision in results if name == "down"] == [
        (gemm, "mxfp8") for gemm in (["dgrad"] if way == "input" else ["dgrad", "wgrad"])
    ]
    assert {name for name, *_ in results} == {"up", "down"}


def test_forces_of_an_energy_read_quantized_weights() -> None:
    model, x = Mlp(), torch.randn(40, 64)

    def cast(value: Tensor, dim: int) -> Tensor:
        return mxcompile.quantize(value.detach(), block_dim=dim).dequantize(torch.float32)

    forces = torch.compile(
        grad(lambda x: model(x).sum()), backend=EagerBackend(policy=EVERYTHING, strict=True), fullgraph=True
    )(x)
    y = torch.tanh(nn.functional.linear(cast(x, -1), cast(model.up.weight, -1), model.up.bias))
    dy = cast(torch.ones(40, 48), -1) @ cast(model.down.weight, 0) * (1 - y * y)
    torch.testing.assert_close(forces, cast(dy, -1) @ cast(model.up.weight, 0), rtol=1e-5, atol=1e-6)


def test_jacobian_takes_many_gradients_in_one_product() -> None:
    params, model = functional(nn.Linear(64, 96))

    def outputs(weights: Params, x: Tensor) -> Tensor:
        return model(weights, x).tanh()

    x = torch.randn(64)
    of_input = recorded(lambda x: jacrev(outputs, 1)(params, x), x, policy=ONE_KIND)
    assert [(gemm, batch * m * n * k) for _, gemm, _, batch, m, n, k, _ in of_input] == [
        ("dgrad", 96 * 64 * 96),
        ("fprop", 64 * 96),
    ]
    of_weight = recorded(lambda weights: jacrev(outputs)(weights, x[None])["weight"], params, policy=ONE_KIND)
    assert [(gemm, precision) for _, gemm, *_, precision in of_weight] == [
        ("fprop", "mxfp8"),
        ("wgrad", "bf16"),
    ]


def test_tangents_stay_as_they_are() -> None:
    """The tangent itself is the value that it is a tangent of: one is quantized, and one is not."""
    model, x = Mlp(), torch.randn(40, 64)
    report = report_of(lambda x: jvp(model, (x,), (x,)), x, training=False, policy=ONE_KIND, strict=True)
    quantized = [gemm.name for gemm in report.gemms if gemm.precision == "mxfp8"]
    tangents = [gemm.name for gemm in report.gemms if gemm.code == "tangent"]
    assert quantized == ["up", "down"]
    assert set(tangents) == {"up", "down"}
    reasons = {gemm.reason for gemm in report.gemms if gemm.code == "tangent"}
    assert reasons == {"a product of a forward-mode derivative"}


def test_jvp_is_that_of_eager_code() -> None:
    model, x, tangent = Mlp(), torch.randn(40, 64), torch.randn(40, 64)
    with torch.no_grad():
        output = torch.compile(
            lambda x, t: jvp(model, (x,), (t,)), backend="mxfp8", options={"policy": "bf16"}
        )(x, tangent)
        expected = jvp(model, (x,), (tangent,))
    torch.testing.assert_close(output, expected)


def test_hessian_quantizes_nothing_but_the_forward() -> None:
    model = Mlp()
    with torch.no_grad():
        records = recorded(hessian(lambda x: model(x).square().sum()), torch.randn(64), policy=ONE_KIND)
    assert [(name, gemm) for name, gemm, *_, precision in records if precision == "mxfp8"] == [
        ("down", "fprop"),
        ("up", "fprop"),
    ]
    assert len(records) > 4
