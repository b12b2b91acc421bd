"""Conditioned transformers, and networks that are none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from animals.models.attention import mlp


class _DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(96, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj, self.mlp = nn.Linear(96, 288), nn.Linear(96, 96), mlp()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(56, 6 * 96))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, 6, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + gate1 * self.proj(y.transpose(1, 2).flatten(-2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer as its paper's code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(36, 56), nn.SiLU(), nn.Linear(56, 56))
        self.blocks = nn.ModuleList([_DiTBlock(), _DiTBlock()])
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(56, 2 * 96))
        self.norm, self.out = nn.LayerNorm(96, elementwise_affine=False), nn.Linear(96, 20)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        c = self.time(t)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.modulation(c).unsqueeze(1).chunk(2, -1)
        return self.out(self.norm(x) * (1 + scale) + shift)


class FiLM(nn.Module):
    """A condition scales and shifts what is in the middle of a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(36, 2 * 208)
        self.norm, self.up = nn.LayerNorm(96), nn.Linear(96, 208)
        self.down, self.out = nn.Linear(208, 96), nn.Linear(96, 20)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale, shift = self.condition(c).unsqueeze(1).chunk(2, -1)
        x = x + self.down(F.gelu(self.up(self.norm(x))) * (1 + scale) + shift)
        return self.out(x)


def classifier() -> nn.Module:
    """Three layers."""
    return nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 72), nn.ReLU(), nn.Linear(72, 7))


class ResidualMLP(nn.Module):
    """A network for tables."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(40, 96), nn.LayerNorm(96)
        self.up, self.down, self.head = nn.Linear(96, 208), nn.Linear(208, 96), nn.Linear(96, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return self.head(x)


class Recommender(nn.Module):
    """DLRM: dense features and embeddings meet in their dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(29, 24) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(13, 56), nn.ReLU(), nn.Linear(56, 24))
        self.top = nn.Sequential(
            nn.Linear(24 + 16, 88), nn.ReLU(), nn.Linear(88, 40), nn.ReLU(), nn.Linear(40, 1)
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_of = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([x, (all_of @ all_of.mT).flatten(1)], 1))


class _GraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_map, self.neighbours = nn.Linear(56, 56), nn.Linear(56, 56)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return F.relu(self.self_map(x) + adjacency @ self.neighbours(x))


class GraphNet(nn.Module):
    """A graph convolution network on a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(40, 56), nn.Linear(56, 7)
        self.layers = nn.ModuleList([_GraphLayer(), _GraphLayer()])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x.mean(0, keepdim=True))


class Autoencoder(nn.Module):
    """In, narrow, out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(120, 64), nn.ReLU(), nn.Linear(64, 24))
        self.decoder = nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 120))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))
