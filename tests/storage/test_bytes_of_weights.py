"""Bytes of weights: what reports say that `quantize_weights_` would store, it stores, and lists the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.policies import every
from small_models import TOKENS, Block, Model, head_rule, row_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import mxcompile

X = torch.randn(8, 96, dtype=torch.bfloat16)


class Twice(nn.Module):
    """A block that runs twice, in FP32, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block().float(), nn.Linear(96, 31)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.block(x.float())))


class Buffers(nn.Module):
    """A feed-forward network with its first weight in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(96), nn.Linear(64, 96)
        self.register_buffer("up", torch.randn(64, 96))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(F.linear(self.norm(x.float()), self.up)))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(128, 96, dtype=torch.bfloat16))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def computed() -> nn.Module:
    """Two of three weights are computed in each call."""
    block = Block()
    parametrizations.weight_norm(block.gate)
    parametrize.register_parametrization(block.up, "weight", Masked())
    return block


TILES = {"precision": "mxfp8", "weight_block": "32x32"}
MIXED = {
    "version": 1,
    "preset": "inference",
    "rules": [
        {"match": {"name": "*up"}, "use": "nvfp4"},
        {"match": {"name": "*gate"}, "use": "mxint8"},
        {"match": {"name": "blocks.0.down"}, "use": TILES},
    ],
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("make", "args", "policy"),
    [
        pytest.param(Twice, (X,), every("mxfp8", preset="inference"), id="repeated"),
        pytest.param(Twice, (X,), every("mxfp4", preset="inference"), id="odd"),
        pytest.param(computed, (X,), "inference", id="computed"),
        pytest.param(Buffers, (X,), "inference", id="buffer"),
        pytest.param(Model, (TOKENS,), "inference", id="tied"),
        pytest.param(Model, (TOKENS,), head_rule("mxfp8"), id="tied_and_stored"),
        pytest.param(Model, (TOKENS,), MIXED, id="formats"),
    ],
)
def test_quantize_weights_stores_the_bytes_that_a_report_says(
    make: Any, args: tuple[Tensor, ...], policy: Any, training: bool
):
    model = make()
    before = mxcompile.explain(model, *args, policy=policy, training=training)
    table = mxcompile.quantize_weights_(model, policy, args=args, progress=False)
    after = mxcompile.explain(model, *args, policy=policy, training=False).summary
    assert before.summary.weight_bytes_quantized == after.weight_bytes == after.weight_bytes_quantized
    assert any(weight.stored for weight in table.weights)
    assert ("quantize_weights_ would" in str(before)) == (after.weight_bytes < before.summary.weight_bytes)


def test_a_weight_in_a_buffer_has_a_row_with_a_reason():
    model = Buffers()
    table = mxcompile.quantize_weights_(model, args=(X,), progress=False)
    row = row_of(table, "up")
    assert (row.stored, row.num_bytes) == (False, model.up.nbytes)
    assert row.reason == "it is a buffer: only parameters are stored"


class Rescaled(nn.Module):
    """A layer with an FP8 weight and one FP32 scale a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 96).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.up.to(x.dtype) * self.scale.to(x.dtype)[:, None]))


def test_fp8_weights_have_the_bytes_of_their_own_scales():
    model = Rescaled()
    summary = mxcompile.explain(model, X, training=False).summary
    assert summary.weight_bytes == model.up.nbytes + model.scale.nbytes == summary.weight_bytes_quantized
    assert summary.weight_bytes_bf16 == 2 * model.up.numel()


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao_have_the_bytes_of_their_parts(config: str):
    quantization = pytest.importorskip("torchao.quantization")
    model, original = Block(), Block()
    quantization.quantize_(model, getattr(quantization, config)())
    names = ("gate.weight", "up.weight", "down.weight")
    table = mxcompile.quantize_weights_(model, args=(X,), progress=False)
    sizes = [
        sum(getattr(weight, part).nbytes for part in weight.__tensor_flatten__()[0])
        for weight in map(model.get_parameter, names)
    ]
    assert [row_of(table, name).num_bytes for name in names] == sizes
    torch._dynamo.reset()
    mxcompile.clear_reports()
    with torch.no_grad():
        torch.compile(model, backend=EagerBackend(policy="inference"))(X)
        reports = mxcompile.reports()[-1], mxcompile.explain(model, X, policy="inference", training=False)
    for report in reports:
        assert report.summary.weight_bytes == report.summary.weight_bytes_quantized == sum(sizes)
    dense = mxcompile.explain(original, X, training=False).summary.parameter_bytes
    assert reports[1].summary.parameter_bytes == dense - 3 * 2 * 96 * 128 + sum(sizes)
