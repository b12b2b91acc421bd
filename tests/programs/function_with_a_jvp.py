"""Dynamo leaves an autograd.Function with a jvp to Python: records have its gradients, strict mode raises."""

import pytest
import torch
from shared import REFUSED, compiled, gemms, messages
from torch import nn
from torch.nn import functional as F

import mxcompile


class Product(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x

    @staticmethod
    def jvp(ctx, dx, dw):
        raise NotImplementedError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(96, 64)
        self.inner = nn.Linear(64, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(Product.apply(self.first(x), self.inner.weight)))


texts = messages()
compiled(Model(), strict=False)(torch.randn(40, 64)).square().mean().backward()
assert {gemm.gemm for gemm in gemms() if gemm.name == "inner"} == {"fprop", "dgrad", "wgrad"}, gemms()
assert mxcompile.reports()[-1].summary.flop_share < 1, "gradients in Python count as MXFP8"
assert any("inner" in text for text in texts), texts
with pytest.raises(REFUSED, match="inner"):
    compiled(Model())(torch.randn(40, 64)).square().mean().backward()
