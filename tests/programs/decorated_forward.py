"""Forwards behind a decorator that takes *args: explain and the compiled model have the names of layers."""

import functools

import torch
from shared import Mlp, compiled, gemms, linears
from torch import nn

import mxcompile


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Block(Mlp):
    forward = decorated(Mlp.forward)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(64, 10)

    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model, x = Model(), torch.randn(32, 64)
planned = {gemm.name for gemm in mxcompile.explain(model, x).gemms}
rules = [{"match": {"name": "layers.0.*"}, "use": "bf16"}]
compiled(model, {"version": 1, "preset": "nvidia", "rules": rules}, strict=False)(x).sum().backward()
assert planned == {gemm.name for gemm in gemms()} == linears(model), (planned, gemms())
precisions = {gemm.name: gemm.precision for gemm in gemms()}
assert (precisions["layers.0.up"], precisions["layers.1.up"]) == ("bf16", "mxfp8"), precisions
