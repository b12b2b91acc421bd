"""A train step is torch.func.grad; a policy quantizes fprop alone: gradients of each layer stay in BF16."""

import torch
from shared import Mlp, compiled, gemms, linears
from torch import nn
from torch.func import functional_call, grad

model = nn.Sequential(Mlp(), Mlp(), nn.Linear(64, 48))
parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
use = {"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "bf16"}


def loss(parameters, x):
    return functional_call(model, parameters, (x,)).square().mean()


step = compiled(grad(loss), {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]})
step(parameters, torch.randn(40, 64))
assert {gemm.name for gemm in gemms()} == linears(model), gemms()
kinds = [gemm.gemm for gemm in gemms()]
assert [kinds.count(kind) for kind in ("fprop", "dgrad", "wgrad")] == [5, 4, 5], kinds
assert [gemm.gemm for gemm in gemms() if gemm.precision == "mxfp8"] == 5 * ["fprop"], gemms()
