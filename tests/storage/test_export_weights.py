"""Weights of a model in training, exported every step: the bytes that its forward multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.casts import quantize
from helpers.eager_backend import EagerBackend
from helpers.policies import every
from small_models import llama, same_bytes
from torch import nn

import mxcompile
from mxcompile.errors import CheckpointError, ModelError

TOKENS = torch.arange(64).view(2, 32) % 60
TILES = every({"weight_block": "32x32", "rounding": "floor"})


def eager(model: nn.Module, policy: Any) -> Any:
    """Compiled, but not by Inductor, which rounds less often to BF16 where it fuses."""
    return torch.compile(model, backend=EagerBackend(policy=policy))


def inductor(model: nn.Module, policy: Any) -> Any:
    return torch.compile(model, backend="mxfp8", options={"policy": policy})


def put(model: nn.Module, exported: mxcompile.ExportedWeights, dtype: torch.dtype) -> None:
    """Give `model` what is exported, and nothing else."""
    for name, codes, scales, _ in exported:
        owner, _, attribute = name.rpartition(".")
        value = codes.clone()
        if scales is not None:
            assert scales.dtype is torch.uint8
            value = mxcompile.MXTensor(value, scales.view(torch.float8_e8m0fnu), -1, dtype)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def trained_and_served(compiled: Callable[..., Any], policy: Any, dtype: torch.dtype, asks: Any) -> None:
    """Train three steps; before each, export to a server and compare its logits with the forward's."""
    model: Any = llama().to(dtype)
    training = compiled(model, policy)
    training(input_ids=TOKENS, labels=TOKENS)
    exported = mxcompile.export_weights(model)
    assert sum(row.stored for row in exported.weights.weights) == 14
    server = llama().to(dtype).requires_grad_(False)
    serving = compiled(server, asks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        out = training(input_ids=TOKENS, labels=TOKENS)
        put(server, exported, dtype)
        with torch.no_grad():
            seen.append(serving(input_ids=TOKENS).logits)
        assert torch.equal(out.logits.detach(), seen[-1])
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(seen[0], seen[2])


def test_weights_exported_each_step_give_logits_of_eager_forward():
    trained_and_served(eager, "nvidia", torch.bfloat16, "inference")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nvidia", "ocp"])
def test_weights_exported_each_step_give_logits_of_compiled_forward(policy):
    trained_and_served(inductor, policy, torch.float32, policy)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).to(torch.bfloat16)


ROWS = torch.randn(4, 64, dtype=torch.bfloat16)


def test_tiles_are_exported_as_the_forward_casts_them():
    model = small()
    eager(model, TILES)(ROWS)
    exported = {export.name: export for export in mxcompile.export_weights(model, args=(ROWS,))}
    elements, repeated = quantize(model[0].weight, -1, torch.float8_e4m3fn, "floor", True)
    assert same_bytes(exported["0.weight"].codes, elements)
    assert torch.equal(exported["0.weight"].scales, repeated)
    assert exported["0.bias"].scales is None
    assert torch.equal(exported["0.bias"].codes, model[0].bias)


def test_a_policy_is_never_guessed():
    model = small()
    with pytest.raises(ModelError, match="call it once, or pass policy="):
        mxcompile.export_weights(model, args=(ROWS,))
    with pytest.raises(ModelError, match="no weight would be exported in MXFP8"):
        mxcompile.export_weights(model, policy="fp8_rowwise", args=(ROWS,))
    with pytest.raises(CheckpointError, match="layout"):
        mxcompile.export_weights(model, "gguf", args=(ROWS,))
    for policy in (TILES, "bf16"):
        torch._dynamo.reset()
        eager(model, policy)(ROWS)
    with pytest.raises(ModelError, match="several policies"):
        mxcompile.export_weights(model, args=(ROWS,))


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_weights_in_mxfp4_are_packed(layout):
    model, policy = small(), {"version": 1, "rules": [{"match": {"name": "2"}, "use": "mxfp4"}]}
    exported = mxcompile.export_weights(model, layout, policy=policy, args=(ROWS,))
    weight = {export.name: export for export in exported}["2.weight"]
    expected = mxcompile.quantize(model[2].weight.detach(), elem_dtype=torch.float4_e2m1fn_x2)
    assert torch.equal(weight.codes, expected.qdata)
    assert torch.equal(weight.scales.view(torch.uint8), expected.scale_bytes)
    rows = {row.name: row for row in exported.weights.weights}
    assert {name: row.precision for name, row in rows.items()} == {"0.weight": "mxfp8", "2.weight": "mxfp4"}
    assert rows["2.weight"].num_bytes == expected.stored_bytes
    if layout == "compressed-tensors":
        groups = exported.quantization_config()["config_groups"].values()
        assert {group["format"]: group["targets"] for group in groups} == {
            "mxfp8-quantized": ["0"], "mxfp4-pack-quantized": ["2"],
        }  # fmt: skip


def test_weight_unsupported_by_the_layout_keeps_dtype_with_reason():
    e5m2 = {"match": {"name": "0"}, "use": {"precision": "mxfp8", "elem_dtype": "e5m2"}}
    policy = {"version": 1, "rules": [e5m2, {"match": {"name": "2"}, "use": "mxfp8"}]}
    exported = mxcompile.export_weights(small(), policy=policy, args=(ROWS,))
    first, second = exported.weights.weights
    assert (first.stored, second.stored) == (False, True)
    assert first.reason == "compressed-tensors has MXFP8 e4m3, MXINT8 int8, MXFP4 e2m1 and NVFP4 e2m1 only"
    assert exported.quantization_config()["ignore"] == ["0"]
    others = mxcompile.export_weights(small(), "torchao", policy=policy, args=(ROWS,))
    by_name = {export.name: export for export in others}
    assert by_name["0.weight"].codes.dtype is torch.float8_e5m2
    assert by_name["2.weight"].scales.dtype is torch.float8_e8m0fnu
