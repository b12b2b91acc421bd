"""Layers in the branches of torch.cond are an error in strict mode; else records have them with the cause."""

import pytest
import torch
from shared import REFUSED, compiled, gemms
from torch import nn


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = (lambda y: self.first(y).relu()), (lambda y: self.second(y).tanh())
        return self.out(torch.cond(x.sum() > 0, *branches, (x,)))


with pytest.raises(REFUSED, match=r"(?s)first.*second"):
    compiled(Branches())(torch.randn(40, 64)).sum().backward()
with torch.no_grad():
    compiled(Branches(), strict=False)(torch.randn(40, 64))
reasons = {gemm.name: gemm.reason for gemm in gemms() if gemm.precision != "mxfp8"}
assert reasons.keys() == {"first", "second"}, reasons
assert all("cond" in reason for reason in reasons.values()), reasons
