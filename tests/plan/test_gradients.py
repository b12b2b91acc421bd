"""A plan knows which products a backward has, and who computes them: autograd, a Function, a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mxcompile.compiler.session.decompositions import table
from mxcompile.plan.plan import Plan, make_plan
from mxcompile.policy import Policy

WIDTH = 8
EVERY = Policy.from_dict(EVERYTHING)


class Multiply(torch.autograd.Function):
    """A product whose gradients it computes by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Model(Made, first=(WIDTH, WIDTH), layer=(WIDTH, 2 * WIDTH, False)):
    """Applies `inner` to a hidden state, whose gradient the first layer needs."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden.sum() + self.inner(self.layer, hidden).sum()


def plan_of(function: Any, *, frozen: bool = False) -> Plan:
    model = Model(inner=function)
    model.layer.requires_grad_(not frozen)
    return make_plan(model, (torch.randn(3, WIDTH),), {}, table())


def without_gradients(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


WAYS: dict[str, tuple[Any, set[str]]] = {
    "a layer": (lambda layer, x: layer(x), {"dgrad", "wgrad"}),
    "of a detached input": (lambda layer, x: layer(x.detach()), {"wgrad"}),
    "without gradients": (without_gradients, set()),
    "that nothing differentiable reads": (lambda layer, x: layer(x).argmax(-1), set()),
    "of an autograd.Function": (lambda layer, x: Multiply.apply(x, layer.weight), {"dgrad", "wgrad"}),
    "of a checkpoint": (lambda layer, x: checkpoint(layer, x, use_reentrant=False), {"dgrad", "wgrad"}),
    "of a reentrant checkpoint": (
        lambda layer, x: checkpoint(layer, x, use_reentrant=True), {"dgrad", "wgrad"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_plan_has_the_gradients_that_a_backward_computes(way: str, frozen: bool):
    function, expected = WAYS[way]
    records = plan_of(function, frozen=frozen).records(EVERY)
    gemms = {gemm.gemm for gemm in records if gemm.name == "layer"}
    assert gemms == {"fprop"} | (expected - {"wgrad"} if frozen else expected)
    assert {gemm.gemm for gemm in records if gemm.name == "first"} == {"fprop", "wgrad"}
    assert {gemm.precision for gemm in records} == {"mxfp8"}


def test_gradients_have_the_sizes_of_their_products():
    sizes = {g.gemm: (g.m, g.n, g.k) for g in plan_of(WAYS["a layer"][0]).records(EVERY) if g.name == "layer"}
    assert sizes == {
        "fprop": (3, 2 * WIDTH, WIDTH),
        "dgrad": (3, WIDTH, 2 * WIDTH),
        "wgrad": (2 * WIDTH, WIDTH, 3),
    }


def test_only_a_reentrant_checkpoint_runs_products_again():
    recomputed = {
        way: any(tag.recomputed for tag in plan_of(function).tags) for way, (function, _) in WAYS.items()
    }
    assert [way for way, runs_again in recomputed.items() if runs_again] == ["of a reentrant checkpoint"]


def test_attention_has_two_gradients_for_each_product():
    def attend(layer: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None])

    roles = [gemm.role for gemm in plan_of(attend).records(EVERY) if gemm.gemm == "dgrad"]
    assert sorted(roles) == ["attn_scores"] * 2 + ["attn_values"] * 2


def test_plan_made_without_gradients_has_none():
    with torch.no_grad():
        plan = plan_of(WAYS["a layer"][0])
    assert not plan.differentiated
    assert {gemm.gemm for gemm in plan.records(EVERY)} == {"fprop"}


class Skipping(Made, layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))):
    """Runs the layers that `kept` names, or those that a random number picks."""

    def forward(self, x: Tensor, kept: list[bool] | None = None) -> Tensor:
        for layer, keep in zip(self.layers, kept or torch.rand(6), strict=False):
            if keep > 0.5:
                x = layer(x)
        return x


def test_plan_knows_whether_it_is_a_guess():
    kept, x = [True, False, True, True, False, True], torch.randn(3, WIDTH)
    assert "recorded once" in make_plan(Skipping(), (x, kept), {}, table()).guess
    whole = make_plan(Skipping(), (x, kept), {}, table(), whole=True)
    assert not whole.guess
    assert list(whole.by_name) == ["layers.0", "layers.2", "layers.3", "layers.5"]
    assert make_plan(Skipping(), (x,), {}, table(), whole=True).guess
