"""A Llama block as people write it, and what it is called with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, KV_HEADS, FFN = 512, 8, 4, 1024
BATCH, LENGTH = 2, 512


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, heads, -1).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, KV_HEADS), (self.v, KV_HEADS))
        )
        k, v = (side.repeat_interleave(HEADS // KV_HEADS, dim=1) for side in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.ffn = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


def block() -> tuple[nn.Module, Tensor]:
    """The block and its input on the meta device, in BF16; the input wants a gradient as inside a model."""
    with torch.device("meta"):
        model = Block().to(torch.bfloat16)
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return model, x
