"""The quality bars: a layer's three GEMMs on random normal data against FP64, and its bias gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.paces import mostly_slow
from helpers.reference import sqnr_db
from helpers.reports import EVERYTHING as POLICY
from torch import Tensor, nn

import mxcompile

TOKENS, K, N = 1000, 1056, 808
BAR_DB = 27.5


def layer(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear layer, its input and its output's gradient, all from a normal distribution."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Linear(K, N, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    x, dy = (torch.randn(TOKENS, size, generator=generator).to(dtype) for size in (K, N))
    return model, x.requires_grad_(), dy


def step(run: Any, model: nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What the three GEMMs and the bias gradient make."""
    y = run(x)
    dx, dw, db = torch.autograd.grad(y, [x, model.weight, model.bias], dy)
    return {"fprop": y.detach(), "dgrad": dx, "wgrad": dw, "bias": db}


def exact(model: nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same in FP64, from the formulas."""
    wide = {"x": x, "w": model.weight, "b": model.bias, "dy": dy}
    x, w, b, dy = (value.detach().double() for value in wide.values())
    return {"fprop": x @ w.t() + b, "dgrad": dy @ w, "wgrad": dy.t() @ x, "bias": dy.sum(0)}


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32), ids=str)
def test_a_compiled_layer_reaches_the_bars(dtype: torch.dtype):
    """The bias gradient is no GEMM: the sum of dy in FP32, rounded once to the layer's dtype."""
    model, x, dy = layer(dtype)
    compiled = torch.compile(model, backend=mxcompile.Backend(policy=POLICY))
    computed, reference = step(compiled, model, x, dy), exact(model, x, dy)
    (report,) = mxcompile.reports()
    assert [gemm.precision for gemm in report.gemms] == ["mxfp8"] * 3
    for gemm in ("fprop", "dgrad", "wgrad"):
        assert BAR_DB <= sqnr_db(reference[gemm], computed[gemm]) < 60, gemm
    assert {value.dtype for value in computed.values()} == {dtype}
    if dtype is torch.float32:
        assert sqnr_db(reference["bias"], computed["bias"]) > 120
    else:
        rounded = reference["bias"].to(torch.bfloat16)
        assert (
            computed["bias"] == rounded
        ).double().mean() > 0.98  # or FP32 put it on the other side of a tie
        bound = reference["bias"].abs() * 2**-8 + 1e-4
        assert bool(((computed["bias"].double() - reference["bias"]).abs() <= bound).all())
