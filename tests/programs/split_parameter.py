"""MLA splits kv_b along dimension 1 for two einsums: both records have its name, and a rule reaches both."""

import torch
from shared import compiled, gemms
from torch import nn


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_b, self.o = nn.Parameter(torch.randn(4, 96, 64) / 8), nn.Linear(128, 64)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        k, v = self.kv_b.split([64, 32], 1)
        c = torch.einsum("thn,hnr->thr", q.view(-1, 4, 64), k)
        return self.o(torch.einsum("thr,hvr->thv", c, v).flatten(1))


rules = [{"match": {"name": "*kv_b*"}, "use": "mxfp8"}]
with torch.no_grad():
    compiled(Latent(), {"version": 1, "preset": "bf16", "rules": rules}, strict=False)(torch.randn(40, 256))
rows = sorted((gemm.name, gemm.precision) for gemm in gemms())
assert rows == [("kv_b", "mxfp8"), ("kv_b", "mxfp8"), ("o", "bf16")], rows
