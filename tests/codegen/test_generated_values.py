"""What the code generated for a GPU computes: run in Triton's interpreter, held to the reference casts."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import casts_both
from helpers.eager import NVIDIA, product
from helpers.reference import sqnr_db
from helpers.written import Written
from interpreted import interpret
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile.lowering.choices import packing
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import codegen


def feed_forward(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    return x + model.down(F.silu(model.gate(y)) * model.up(y))


def _expected(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """The same with the reference casts, rounding to BF16 where a kernel stores: what is fused stays FP32.

    The norm is quantized from its BF16 result: the FP32 it computes in is not the model's.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.float()
    y = normed.to(x.dtype).float().detach() + (normed - normed.detach())  # its gradient stays FP32
    gated = F.silu(_linear(y, gate).float()) * _linear(y, up).float()
    out = product(gated.to(x.dtype), down.t(), NVIDIA, torch.float32) + bias.float()
    return (out.to(x.dtype).float() + wide).to(x.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight.t(), NVIDIA, weight.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ((70, 72, 104), "mx_scaled_mm 128x128x128"),  # rows that the accelerator cannot read
        ((150, 160, 272), "mx_scaled_mm_tiled 128x128x128"),
    ],
)
def test_generated_feed_forward_layer_of_odd_sizes_matches_reference(sizes, form, tmp_path):
    """Tokens and widths that are no multiples of 32, of a tile or of the other layout's blocks."""
    tokens, width, hidden = sizes
    layers = {name: nn.Linear(width, hidden, bias=False) for name in ("gate", "up")}
    layers |= {"norm": nn.RMSNorm(width, eps=1e-6), "down": nn.Linear(hidden, width)}
    model = Written(feed_forward, **{name: layers[name] for name in ("norm", "gate", "up", "down")})
    model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # blocks of many binades
            parameter.normal_().mul_(torch.exp2(torch.randint(-6, 2, parameter.shape)))
    x = torch.randn(tokens, width).mul_(torch.exp2(torch.randint(-8, 8, (tokens, 1)))).to(torch.bfloat16)
    x.requires_grad_()
    result = codegen(model, x, target="sm_100", out_dir=tmp_path)
    casts = {launch.kernel for launch in result.launches if casts_both(result, launch)}
    assert len(casts) > 1
    one_for_two = any(casts_both(result, launch, 2) for launch in result.launches)
    assert one_for_two == packing.converts(TARGETS["sm_100"])  # SwiGLU's gradients
    assert {gemm.kernel.removesuffix(" (tcgen05.mma block_scale)") for gemm in result.report.gemms} == {form}
    products = [result.kernel(launch) for launch in result.launches if launch.gemms]
    assert all(("tma_tile." in kernel.source) == ("tiled" in form) for kernel in products)

    expected = _expected(x, *model.parameters())
    gradient = torch.randn_like(expected)
    norm, *others = model.parameters()
    inputs = [norm, x, *others]  # in the order of their first use
    wanted = torch.autograd.grad(expected, inputs, gradient)
    out, *gradients = interpret(tmp_path, inputs, gradient)
    assert sqnr_db(expected, out) > 50  # sums in another order, then rounded to BF16
    for computed, reference in zip(gradients, wanted, strict=True):
        assert sqnr_db(reference, computed) > 100
