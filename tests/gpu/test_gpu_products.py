"""FP8 products on the GPU of this machine: a linear layer and its gradients against casts by hand in FP64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.one_linear import ByHand, expected, policy, run
from helpers.reference import sqnr_db
from torch import Tensor, nn

import mxcompile
from mxcompile.lowering.targets import of_device

pytestmark = pytest.mark.gpu

FP8: dict[str, dict[str, Any]] = {
    "tensor": {"precision": "fp8", "scaling": "tensor", "grad_dtype": "e5m2"},
    "channel": {"precision": "fp8", "scaling": "channel"},
    "block": {"precision": "fp8", "scaling": "block"},
    "block pow2": {"precision": "fp8", "scaling": "block", "scale": "pow2"},
    "mxfp8": {"precision": "mxfp8"},
}
SIZES = [(512, 384), (45, 37)]
"""K and N: the vendor's FP8 GEMM takes the first."""


def layer(k: int, n: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False).bfloat16()


def on_device(master: nn.Linear, use: dict[str, Any]) -> tuple[nn.Linear, Any]:
    moved = layer(master.in_features, master.out_features).to("cuda")
    return moved, torch.compile(moved, backend="mxfp8", options={"policy": policy(use)})


def step(call: Any, weight: Tensor, x: Tensor, dy: Tensor) -> list[Tensor]:
    return [result.cpu() for result in run(call, weight, x.cuda(), dy.cuda())]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FP8)
def test_a_linear_layer_equals_the_one_by_hand(name: str, sizes: tuple[int, int]):
    k, n = sizes
    use, master = FP8[name], layer(k, n)
    moved, call = on_device(master, use)
    for tokens in (256, 33):
        x, dy = torch.randn(tokens, k).bfloat16(), torch.randn(tokens, n).bfloat16()
        results = step(call, moved.weight, x, dy)
        for tensor, other in zip(results, expected(x, master.weight.detach(), dy, use), strict=True):
            assert sqnr_db(other, tensor) > 45
    kernels = [gemm.kernel for gemm in mxcompile.reports()[-1].gemms]
    if of_device(torch.device("cuda")).fp8_tiles and name == "tensor" and k % 16 == 0:
        assert all("_scaled_mm" in kernel for kernel in kernels), kernels


def test_delayed_scales_follow_the_amax_of_earlier_steps():
    k, n = SIZES[0]
    use = {"precision": "fp8", "scaling": "delayed", "history": 3, "grad_dtype": "e5m2"}
    master = layer(k, n)
    moved, call = on_device(master, use)
    by_hand = ByHand(master.weight, 3)
    for number in range(4):
        x, dy = (2.0**number * torch.randn(64, size).bfloat16() for size in (k, n))
        results = step(call, moved.weight, x, dy / 64)
        for tensor, other in zip(results, by_hand.step(x, dy / 64), strict=True):
            assert sqnr_db(other, tensor) > 45
    seen = torch.tensor([by_hand.seen[name] for name in ("x", "w", "dy")])
    torch.testing.assert_close(moved.weight_amax_history.cpu(), seen, rtol=1e-6, atol=0)
