"""Layers whose input is a constant, a buffer or a parameter: rules reach them without a bias too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING, report_of
from torch import Tensor, nn

WIDTH, WIDE = 64, 96


class Positions(nn.Module):
    """Adds positions that `embed` makes to a layer. broken: whether a graph break cuts the model."""

    def __init__(self, call: Callable[[Positions], Tensor], *, broken: bool = False) -> None:
        super().__init__()
        self.up, self.embed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDE, WIDTH, bias=False)
        self.register_buffer("grid", torch.randn(8, WIDE))
        self.query = nn.Parameter(torch.randn(8, WIDE))
        self.call, self.broken = call, broken

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.broken:
            torch._dynamo.graph_break()
        return y + self.call(self)


CALLS: dict[str, Callable[[Positions], Tensor]] = {
    "buffer": lambda model: model.embed(model.grid),
    "parameter": lambda model: model.embed(model.query),
    "constant": lambda model: model.embed(torch.arange(8.0 * WIDE).view(8, WIDE) / WIDE),
    "function": lambda model: nn.functional.linear(model.query, model.embed.weight),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_layer_of_a_fixed_input_is_quantized_by_a_rule(call: str, *, broken: bool) -> None:
    model, x = Positions(CALLS[call], broken=broken), torch.randn(8, WIDTH)
    report = report_of(model, x, fullgraph=False, policy=EVERYTHING, strict=True)
    gemms = {(gemm.name, gemm.gemm) for gemm in report.gemms if gemm.precision == "mxfp8"}
    assert {("embed", "fprop"), ("embed", "wgrad")} <= gemms
    assert ("embed", "dgrad") in gemms or call not in ("parameter", "function")


def test_weight_update_of_two_parameters_stays_a_weight() -> None:
    class Updated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)
            self.a, self.b = nn.Parameter(torch.randn(32, WIDTH)), nn.Parameter(torch.randn(WIDTH, 32))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.up.weight + self.b @ self.a)

    report = report_of(Updated(), torch.randn(8, WIDTH), policy=EVERYTHING, strict=True)
    gemms = [(gemm.gemm, gemm.precision) for gemm in report.gemms if gemm.name == "up"]
    assert gemms == [("fprop", "mxfp8"), ("wgrad", "mxfp8")]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm`")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_layer_whose_hook_normalizes_its_weight_is_quantized(norm: Any) -> None:
    model = nn.Sequential(norm(nn.Linear(WIDTH, WIDE)), nn.Linear(WIDE, WIDTH))
    report = report_of(model, torch.randn(8, WIDTH), fullgraph=False, policy=EVERYTHING, strict=True)
    layers = [
        (gemm.gemm, gemm.precision) for gemm in report.gemms if (gemm.m, gemm.n) in ((8, WIDE), (WIDE, WIDTH))
    ]
    assert layers.count(("fprop", "mxfp8")) == layers.count(("wgrad", "mxfp8")) == 1
    assert {gemm.precision for gemm in report.gemms if 1 in (gemm.m, gemm.n)} == {"bf16"}, "power iterations"


class Noisy(nn.Module):
    """A layer whose weight has noise of a learned width (NoisyNet), and one whose weight has a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, bias=False)
        self.spread = nn.Parameter(torch.full((WIDE, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight + self.spread * torch.randn_like(self.spread)
        hidden = nn.functional.relu(nn.functional.linear(x, weight, self.up.bias))
        return hidden @ nn.functional.dropout(self.down.weight, 0.1).t()


def test_weight_with_random_numbers_is_a_weight() -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    report = report_of(Noisy(), x, policy=EVERYTHING, strict=True)
    gemms = {(gemm.name, gemm.gemm) for gemm in report.gemms if gemm.precision == "mxfp8"}
    assert gemms == {(name, gemm) for name in ("up", "down") for gemm in ("fprop", "dgrad", "wgrad")}


def test_parameters_with_random_numbers_are_data_elsewhere() -> None:
    """Learned queries with a dropout are the input of a layer, and attend to each other as activations."""

    class Queries(Made, query=lambda: nn.Parameter(torch.randn(8, WIDTH)), up=(WIDTH, WIDTH, False)):
        def forward(self, x: Tensor) -> Tensor:
            query = nn.functional.dropout(self.query, 0.1)
            return x + (nn.functional.dropout(self.query, 0.1) @ query.t()).softmax(-1) @ self.up(query)

    report = report_of(Queries(), torch.randn(8, WIDTH), policy=EVERYTHING, strict=True)
    forward = {(gemm.name, gemm.precision) for gemm in report.gemms if gemm.gemm == "fprop"}
    assert forward == {("up", "mxfp8"), ("", "bf16")}
