"""A small Llama in plain PyTorch, in FP32, and tokens to train it on. Shared by the examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 256, 64, 192, 2, 32


class Block(nn.Module):
    """A pre-norm block: attention and SwiGLU, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after the block; `x` and the result are [batch, length, WIDTH]."""
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """A causal language model with `depth` blocks."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token after each of `tokens`, [batch, length, VOCABULARY]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the mean next-token loss of `tokens` [batch, LENGTH + 1]."""
        return F.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch() -> Tensor:
    """Returns a batch [8, LENGTH + 1] of counting sequences, which are easy to learn."""
    start = torch.randint(0, VOCABULARY, (8, 1))
    return (start + torch.arange(LENGTH + 1)) % VOCABULARY


def factory() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns (model, args, kwargs) for the command line: `mxcompile explain tiny:factory`."""
    return Model(), (batch(),), {}
