"""Experts on the GPU of this machine, batched and grouped, compiled, against the reference on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager import NVIDIA, grouped_product, product
from helpers.policies import every
from helpers.reference import sqnr_db
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile

pytestmark = pytest.mark.gpu

EXPERTS, WIDTH, HIDDEN = 4, 144, 208


class Experts(nn.Module):
    """down(gelu(up x)) of each expert, by the products `multiply` makes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator).bfloat16())
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator).bfloat16())

    def forward(self, x: Tensor, multiply: Any, offs: Tensor | None) -> Tensor:
        y = F.gelu(multiply(x, self.up, offs))
        return multiply(y, self.down.mT, offs)


def _batched(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    return torch.bmm(x, w)


def _grouped(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    return F.grouped_mm(x, w, offs=offs)


def _reference(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    if offs is not None:
        return grouped_product(x, w, offs, NVIDIA)
    return torch.stack([product(rows, other, NVIDIA, x.dtype) for rows, other in zip(x, w, strict=True)])


def _step(model: Any, experts: Experts, x: Tensor, *arguments: Any) -> list[Tensor]:
    """Output and gradients, on the CPU."""
    out = model(x, *arguments)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    gradients = torch.autograd.grad(out, [x, experts.up, experts.down], direction)
    return [tensor.detach().cpu() for tensor in (out, *gradients)]


@pytest.mark.parametrize("ends", [None, (70, 70, 271, 300), (300, 300, 300, 300)], ids=str)
def test_compiled_experts_match_reference_on_the_gpu(ends: tuple[int, ...] | None):
    """Groups that end inside blocks, empty ones; entries of which 32 is no divisor of the rows."""
    generator = torch.Generator().manual_seed(3)
    shape = (EXPERTS, 70, WIDTH) if ends is None else (300, WIDTH)
    x = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    here = Experts()
    expected = _step(here, here, x, _reference, offs)
    there, x = Experts().cuda(), x.detach().cuda().requires_grad_()
    compiled = torch.compile(there, backend="mxfp8", options={"policy": every("mxfp8")}, fullgraph=True)
    multiply = _batched if ends is None else _grouped
    results = _step(compiled, there, x, multiply, None if offs is None else offs.cuda())
    report = mxcompile.reports()[-1]
    assert [gemm.precision for gemm in report.gemms] == ["mxfp8"] * 6
    assert all(gemm.kernel for gemm in report.gemms)
    for wanted, computed in zip(expected, results, strict=True):
        assert sqnr_db(wanted, computed) > 40
