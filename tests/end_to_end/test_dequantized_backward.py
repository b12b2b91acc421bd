"""Dgrad and wgrad multiply the operands of fprop, dequantized (`backward: dequantized`)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.one_linear import cast, policy, run
from helpers.reference import sqnr_db
from torch import Tensor, nn

import mxcompile
from mxcompile.policy import Policy

USES: dict[str, dict[str, Any]] = {
    "mxfp8": {"precision": "mxfp8"},
    "mxfp8 squares": {"precision": "mxfp8", "weight_block": "32x32"},
    "fp8 tensor": {"precision": "fp8", "scaling": "tensor"},
    "fp8 block": {"precision": "fp8", "scaling": "block"},
    "mxfp4": {"fprop": "mxfp4"},
    "nvfp4 squares": {"precision": "nvfp4", "weight_block": "16x16"},
    "nvfp4 4 over 6, row-scaled": {
        "precision": "nvfp4", "four_over_six": {"x": 256, "w": 256}, "row_scaled": "x",
    },
}  # fmt: skip
K, N = 45, 37


class Straight(torch.autograd.Function):
    """A linear layer of quantized operands whose gradients read these operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, use: dict[str, Any], dtype: torch.dtype) -> Tensor:
        x, w = (cast(tensor, -1, name, use).to(dtype) for tensor, name in ((x, "x"), (w, "w")))
        ctx.save_for_backward(x, w)
        return x.double() @ w.double().t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = (tensor.double() for tensor in ctx.saved_tensors)
        return dy.double() @ w, dy.double().t() @ x, None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", USES)
def test_gradients_are_those_of_the_operands_of_fprop(name: str, dtype: torch.dtype):
    use = USES[name]
    layer = nn.Linear(K, N, bias=False, dtype=dtype)
    backend = EagerBackend(policy=policy({**use, "backward": "dequantized"}))
    call = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)
    for tokens in (17, 130):
        x, dy = torch.randn(tokens, K, dtype=dtype), torch.randn(tokens, N, dtype=dtype)
        outputs = run(call, layer.weight, x, dy)
        x, w = x.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
        y = Straight.apply(x, w, use, dtype)
        dx, dw = torch.autograd.grad(y, (x, w), dy.double())
        least = 100 if dtype is torch.float32 else 40
        for tensor, other in zip(outputs, (y.detach(), dx, dw), strict=True):
            assert sqnr_db(other.double(), tensor.double()) > least
    reasons = {gemm.gemm: gemm.reason for gemm in mxcompile.reports()[-1].gemms}
    assert "its w is the dequantized operand of fprop" in reasons["dgrad"]
    assert "its x is the dequantized operand of fprop" in reasons["wgrad"]
    assert "dequantized" not in reasons["fprop"]


def test_the_record_has_the_words_of_scales():
    """Operands have equally many words, so that tables can compare them word by word."""
    use = {"precision": "nvfp4", "four_over_six": {"w": 448, "error": "mse"}, "row_scaled": "x"}
    layer = nn.Linear(64, 96, bias=False)
    torch.compile(layer, backend=EagerBackend(policy=policy(use)))(torch.randn(40, 64))
    (gemm,) = (gemm for gemm in mxcompile.reports()[-1].gemms if gemm.gemm == "fprop")
    assert {str(form) for form in gemm.formats} == {
        "x:e2m1 1x16 two-level row-scaled",
        "w:e2m1 1x16 two-level 4over6:448:mse",
    }
    assert len({len(form.words) for form in gemm.formats}) == 1


def test_no_copy_along_columns_is_made():
    layer = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    backend = EagerBackend(policy=policy({"precision": "mxfp8", "backward": "dequantized"}))
    x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend=backend)(x).sum().backward()
    (graph,) = backend.ir
    assert re.findall(r"@(-\d) codes", graph) == ["-1", "-1"]


@pytest.mark.parametrize("name", USES)
def test_codes_of_weights_are_not_kept_for_backward(name: str):
    """Backward casts a weight again, because the weight exists anyway."""
    layer = nn.Linear(64, 512, bias=False, dtype=torch.bfloat16)
    call = torch.compile(
        layer, backend=EagerBackend(policy=policy({**USES[name], "backward": "dequantized"}))
    )
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    computed = [tensor.numel() for tensor in kept if tensor is not layer.weight]
    assert computed
    assert max(computed) < layer.weight.numel()


def test_layers_that_stay_in_the_models_dtype_have_its_gradients():
    """Their operands are not quantized, so nothing is dequantized."""
    rule = {"match": {"name": "*"}, "use": {"fprop": "bf16", "backward": "dequantized"}}
    layer = nn.Linear(64, 96, bias=False)
    call = torch.compile(layer, backend=EagerBackend(policy={"version": 1, "rules": [rule]}))
    x, dy = torch.randn(40, 64), torch.randn(40, 96)
    _, dx, dw = run(call, layer.weight, x, dy)
    assert torch.allclose(dx, dy @ layer.weight.detach(), atol=1e-5)
    assert torch.allclose(dw, dy.t() @ x, atol=1e-4)
    assert all("dequantized" not in gemm.reason for gemm in mxcompile.reports()[-1].gemms)


def test_an_operand_that_fprop_casts_otherwise_is_noted():
    """Rows past the last group are 0 in the cast of fprop, because they count in the scale of the tensor."""
    offs = torch.tensor([20, 32], dtype=torch.int32)
    weight = nn.Parameter(torch.randn(2, 48, 32, dtype=torch.bfloat16))
    backend = EagerBackend(policy=policy({"precision": "nvfp4", "backward": "dequantized"}))
    call = torch.compile(lambda x: torch._grouped_mm(x, weight, offs), backend=backend)
    run(call, weight, torch.randn(40, 48, dtype=torch.bfloat16), torch.randn(40, 32, dtype=torch.bfloat16))
    reasons = {gemm.gemm: gemm.reason for gemm in mxcompile.reports()[-1].gemms}
    assert "its x is not quantized: fprop casts another tensor" in reasons["wgrad"]
    assert "its w is the dequantized operand of fprop" in reasons["dgrad"]


def test_the_key_is_written_and_read():
    data = policy({"precision": "nvfp4", "backward": "dequantized"})
    restored = Policy.from_dict(Policy.from_dict(data).to_dict())
    assert restored == Policy.from_dict(data)
    assert restored.to_dict()["rules"][0]["use"] == {"precision": "nvfp4", "backward": "dequantized"}
