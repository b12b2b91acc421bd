"""Mixtures of experts as training frameworks write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from animals.models.attention import SwiGLU, Titan, TitanBlock


class _Router(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(96, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(x).softmax(-1).topk(2, dim=-1)


class _Grouped(nn.Module):
    """torchtitan's: stacked weights, tokens sorted by expert, one grouped product a matrix."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, hidden, 96) * 0.02) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, 96, hidden) * 0.02)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        w1, w2, w3 = (w.to(torch.bfloat16).transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        x = x.to(torch.bfloat16)
        h = F.silu(torch._grouped_mm(x, w1, offs=ends)) * torch._grouped_mm(x, w3, offs=ends)
        return torch._grouped_mm(h, w2, offs=ends)


class _TitanMoE(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router, self.experts = _Router(experts), _Grouped(experts, 40)
        self.shared_expert = SwiGLU(96, 72)
        self.num_experts = experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(rows)
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.long, device=x.device).scatter_add(
            0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1))
        )
        routed = self.experts(rows[order // 2], counts).to(x.dtype)
        routed = routed * scores.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
        out = self.shared_expert(rows).index_add(0, order // 2, routed)
        return out.view_as(x)


def titan_moe() -> nn.Module:
    """A dense block, then one with experts."""
    return Titan(TitanBlock(_TitanMoE()), TitanBlock(_TitanMoE()))


class SoftMoE(nn.Module):
    """Every slot of every expert reads a mixture of all tokens, weighted by a softmax over them."""

    def __init__(self, experts: int = 3, slots: int = 5) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(96, experts, slots) * 0.02)
        self.w1 = nn.Parameter(torch.randn(experts, 96, 208) * 0.02)
        self.w2 = nn.Parameter(torch.randn(experts, 208, 96) * 0.02)
        self.norm, self.out = nn.LayerNorm(96), nn.Linear(96, 37)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        logits = torch.einsum("bnd,des->bnes", y, self.phi)
        slots = torch.einsum("bnes,bnd->ebsd", logits.softmax(1), y)
        rows = slots.flatten(1, 2)
        done = (F.gelu(rows @ self.w1) @ self.w2).view_as(slots)
        x = x + torch.einsum("bnes,ebsd->bnd", logits.flatten(2).softmax(-1).view_as(logits), done)
        return self.out(x)
