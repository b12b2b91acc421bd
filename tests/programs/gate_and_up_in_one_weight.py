"""Gate and up are a (d, 2, f) weight, used by einsum as T5X and MaxText do: roles ffn_in and ffn_out."""

import torch
from shared import compiled, gemms
from torch import nn


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.wi, self.wo = nn.Parameter(torch.randn(64, 2, 128) / 8), nn.Parameter(torch.randn(128, 64) / 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("btd,dcf->cbtf", self.norm(x), self.wi)
        return x + torch.einsum("btf,fd->btd", nn.functional.silu(gate) * up, self.wo)


with torch.no_grad():
    compiled(nn.Sequential(Gated(), Gated(), Gated()), "nvidia", strict=False)(torch.randn(2, 40, 64))
roles = {gemm.name: gemm.role for gemm in gemms()}
assert roles == {
    f"{i}.{name}": role for i in range(3) for name, role in (("wi", "ffn_in"), ("wo", "ffn_out"))
}
