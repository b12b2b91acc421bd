"""A small language model with experts, as tests of reasons explain it: two blocks, tokens in, logits out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, VOCAB = 64, 4, 131


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Every token through the two experts that it chose, their weights gathered from stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 96, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 96))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        twice = rows.repeat_interleave(2, 0).unsqueeze(-1)
        hidden = F.silu(torch.bmm(self.up[chosen.view(-1)], twice))
        y = torch.bmm(self.down[chosen.view(-1)], hidden).view(-1, 2, WIDTH)
        return (y * weights.unsqueeze(-1)).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn, self.experts = Attention(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.experts(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What the command line takes as a model."""
    return Model(), (torch.zeros(2, 8, dtype=torch.int64),), {}
