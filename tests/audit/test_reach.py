"""How far the error of each forward GEMM reaches, held to eager autograd and the reference cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import reference
from helpers.made import Made
from torch import Tensor, nn

import mxcompile
from mxcompile.analysis.audit import Audit
from mxcompile.analysis.study.session import noisy

TOKENS, WIDTH = 96, 64


class Layers(nn.Module):
    """Two layers, the first of them square, and the second `times` times."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        for _ in range(self.times):
            x = torch.tanh(self.down(x))
        return x


class Beside(Made, up=(WIDTH, WIDTH), down=(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * self.up(x) + self.down(x)


def changes(audit: Audit) -> dict[str, float | None]:
    return {gemm.name: gemm.output_change for gemm in audit.numerics.gemms if gemm.gemm == "fprop"}


def expected(model: Layers, x: Tensor) -> dict[str, float]:
    """From hooks on eager layers: Σ (g_row · e_row)² over the output's squares, by layer."""
    errors: dict[str, list[Tensor]] = {"up": [], "down": []}
    squares = dict.fromkeys(errors, 0.0)

    def hook(name: str, layer: nn.Linear) -> Any:
        def seen(_: Any, args: tuple[Tensor], out: Tensor) -> None:
            operands = (
                reference.round_trip(operand.detach(), -1).double() for operand in (args[0], layer.weight)
            )
            exact = args[0].detach().double() @ layer.weight.detach().double().T
            left, right = operands
            error = left @ right.T - exact

            def back(gradient: Tensor) -> None:
                squares[name] += float((gradient.double() * error).sum(-1).square().sum())

            out.register_hook(back)

        return seen

    for name in errors:
        layer = getattr(model, name)
        layer.register_forward_hook(hook(name, layer))
    out = model(x)
    total = noisy(out)
    assert total is not None
    total.backward()
    size = float(out.detach().double().square().sum())
    return {name: (square / size) ** 0.5 for name, square in squares.items()}


ALL = dict.fromkeys(("fprop", "dgrad", "wgrad"), "mxfp8")


def policy(**use: str) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": {"min_m": 1}, "use": ALL | use}]}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("use", [{}, {"dgrad": "bf16"}], ids=["both", "wgrad alone"])
def test_output_change_equals_autograd(x: Tensor, use: dict[str, str], times: int):
    model = Layers(times)
    changed = changes(mxcompile.audit(model, x, policy=policy(**use)))
    assert changed == pytest.approx(expected(model, x.detach()), rel=1e-3)


def test_output_change_estimates_the_layer_quantized_alone(x: Tensor):
    model = Layers()
    changed = changes(mxcompile.audit(model, x, policy=policy()))
    with torch.no_grad():
        exact = model(x)
        for name in ("up", "down"):
            layer = getattr(model, name)
            handle = layer.register_forward_hook(
                lambda layer, args, out: (
                    reference.round_trip(args[0], -1) @ reference.round_trip(layer.weight, -1).T
                    + (0 if layer.bias is None else layer.bias)
                )
            )
            alone = float((model(x) - exact).norm() / exact.norm())
            handle.remove()
            assert changed[name] == pytest.approx(alone, rel=0.25)


def test_a_layer_whose_error_is_damped_comes_last(x: Tensor):
    """Both layers have the same FLOPs and nearly the same relative error."""
    audit = mxcompile.audit(Beside(), x, policy=policy())
    first, second = (gemm.name for gemm in audit.numerics.worst_gemms() if gemm.gemm == "fprop")
    assert (first, second) == ("down", "up")
    assert str(audit).count("%") > 6


def test_a_gradient_that_no_quantized_gemm_reads_is_not_seen(x: Tensor):
    audit = mxcompile.audit(Layers(), x, policy=policy(dgrad="bf16", wgrad="bf16"))
    assert set(changes(audit).values()) == {None}


def test_without_gradients_nothing_is_estimated(x: Tensor):
    with torch.no_grad():
        audit = mxcompile.audit(Layers(), x.detach(), policy=policy())
    assert set(changes(audit).values()) == {None}
