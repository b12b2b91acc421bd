"""``mode="max-autotune"`` on the GPU of this machine: whatever wins is right, and the record names it."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.blocks import FeedForward
from helpers.eager import NVIDIA, product
from helpers.policies import every
from helpers.reference import sqnr_db
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile
from mxcompile.lowering.targets import of_device

pytestmark = pytest.mark.gpu

MODE = "max-autotune-no-cudagraphs"


def _expected(model: FeedForward, x: Tensor) -> Tensor:
    """The same with the reference casts on the CPU."""

    def linear(y: Tensor, layer: nn.Linear) -> Tensor:
        out = product(y, layer.weight.detach().t(), NVIDIA, torch.float32)
        return (out + layer.bias.detach().float()).to(y.dtype)

    return x + linear(F.gelu(linear(x, model.up)), model.down)


def _compiled(model: FeedForward, x: Tensor) -> tuple[Tensor, mxcompile.Report]:
    backend = mxcompile.Backend(policy=every("mxfp8"), mode=MODE)
    step = torch.compile(copy.deepcopy(model).to("cuda"), backend=backend, fullgraph=True)
    with torch.no_grad():
        out = step(x.to("cuda")).cpu()
    return out, mxcompile.reports()[-1]


@pytest.mark.parametrize(
    ("tokens", "width", "hidden"), [(1, 512, 1024), (5, 520, 1100), (64, 1024, 4096), (300, 1000, 4096)]
)
def test_the_winner_equals_the_reference_and_is_named(tokens, width, hidden):
    model = FeedForward(width, hidden).to(torch.bfloat16)
    x = torch.randn(tokens, width).to(torch.bfloat16)
    out, report = _compiled(model, x)
    assert sqnr_db(_expected(model, x), out) > 40  # casts of the second layer amplify roundings of the first
    kernels = [gemm.kernel for gemm in report.gemms]
    assert not any("autotuned of" in kernel for kernel in kernels), kernels
    if of_device(torch.device("cuda")).native:
        prefixes = ("mx_quantize_mm ", "mx_scaled_mm", "torch._scaled_mm")
        assert all(kernel.startswith(prefixes) for kernel in kernels), kernels


def test_a_warm_cache_names_the_same():
    model, x = FeedForward(512, 1024).to(torch.bfloat16), torch.randn(300, 512).to(torch.bfloat16)
    first, report = _compiled(model, x)
    torch._dynamo.reset()
    second, same = _compiled(model, x)
    assert same.summary.cache == "hit"
    assert [gemm.kernel for gemm in same.gemms] == [gemm.kernel for gemm in report.gemms]
    assert torch.equal(first, second)
