"""Weights are tensors that a function takes: a rule for all names quantizes every product of a step."""

import torch
from shared import compiled, gemms
from torch.nn import functional as F

first, last = torch.randn(96, 64, requires_grad=True), torch.randn(64, 96, requires_grad=True)
call = compiled(lambda x, first, last: F.linear(F.relu(F.linear(x, first)), last))
call(torch.randn(40, 64), first, last).sum().backward()
kinds = sorted(gemm.gemm for gemm in gemms())
assert kinds == ["dgrad", "fprop", "fprop", "wgrad", "wgrad"], kinds
assert {gemm.precision for gemm in gemms()} == {"mxfp8"}, gemms()
