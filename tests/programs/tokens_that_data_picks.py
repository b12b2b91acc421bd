"""An expert takes the tokens that the data picks: their number is unknown in records, rules and FLOPs."""

import torch
from shared import Mlp, compiled, gemms
from torch import nn

import mxcompile

torch._dynamo.config.capture_dynamic_output_shape_ops = True


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = Mlp(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        chosen = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.expert(x[chosen]))


rules = [{"match": {"name": "*", "min_m": 64}, "use": "mxfp8"}]
with torch.no_grad():
    compiled(Mix(), {"version": 1, "preset": "bf16", "rules": rules}, strict=False)(torch.randn(4000, 64))
rows = {gemm.name: (gemm.m, gemm.precision) for gemm in gemms()}
assert rows["expert.up"] == rows["expert.down"] == (None, "mxfp8"), rows
assert "unknown FLOPs" in " ".join(str(mxcompile.reports()[-1]).split()), "the share counts these products"
