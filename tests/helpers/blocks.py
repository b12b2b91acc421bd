"""Building blocks of models, written without meaningful names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64


def features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Linear(inputs, outputs)
        self.b, self.c = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 2.0 * self.c(self.b(x))


class Attention(nn.Module):
    """a, b, c: q, k, v. d: output. e: gate on the result, if gated."""

    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear, gated: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (linear(WIDTH, WIDTH) for _ in range(4))
        self.e = nn.Linear(WIDTH, WIDTH) if gated else None
        self.f = nn.RMSNorm(WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)

        q, k, v = self.f(heads(self.a(x))), self.f(heads(self.b(x))), heads(self.c(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.d(y if self.e is None else y * torch.sigmoid(self.e(x)))


class SwiGLU(nn.Module):
    def __init__(self, linear: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(WIDTH, 96), linear(WIDTH, 96), linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.a(x)) * self.b(x))


def block(linear: Callable[..., nn.Module] = nn.Linear, gated: bool = False) -> nn.Module:
    return nn.Sequential(Residual(Attention(linear, gated)), Residual(SwiGLU(linear)))


class Latent(nn.Module):
    """Attention from compressed q and kv, with a part of k that skips the compression."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 24), nn.RMSNorm(24), nn.Linear(24, 96)
        self.d, self.e, self.f = nn.Linear(WIDTH, 24), nn.RMSNorm(16), nn.Linear(16, 128)
        self.g = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.c(self.b(self.a(x))).view(batch, length, 4, 24).transpose(1, 2)
        compressed, direct = self.d(x).split([16, 8], -1)
        kv = self.f(self.e(compressed)).view(batch, length, 4, 32).transpose(1, 2)
        k, v = kv.split([16, 16], -1)
        k = torch.cat([k, direct.view(batch, 1, length, 8).expand(batch, 4, length, 8)], -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.g(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Parallel(nn.Module):
    """Attention and feed-forward side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(WIDTH), Attention()
        self.c, self.d = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return x + self.b(y) + self.d(F.gelu(self.c(y), approximate="tanh"))


class Modulated(nn.Module):
    """A diffusion transformer's block: norms scaled and shifted by a projection of the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 6 * WIDTH), Attention()
        self.c, self.d = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.e = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        m = self.a(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + m[2] * self.b(self.e(x) * (1 + m[1]) + m[0])
        return x + m[5] * self.d(F.gelu(self.c(self.e(x) * (1 + m[4]) + m[3])))


class Patches(nn.Module):
    """Patches projected, a block, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, WIDTH), block(), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)).mean(1))


class Language(nn.Module):
    """Embedding, block, head; the head tied to the embedding or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(100, WIDTH), block()
        self.c = nn.Linear(WIDTH, 100, bias=False)
        if tied:
            self.c.weight = self.a.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.c(self.b(self.a(ids)))


class Experts(nn.Module):
    """Every expert on every token, weighted by a top-k of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 4)
        self.b = nn.Parameter(0.1 * torch.randn(4, WIDTH, 32))
        self.c = nn.Parameter(0.1 * torch.randn(4, 32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights = self.a(tokens).softmax(-1)
        top, index = weights.topk(2)
        chosen = torch.zeros_like(weights).scatter(1, index, top)
        hidden = F.gelu(torch.einsum("td,edf->etf", tokens, self.b))
        y = torch.einsum("etf,efd->etd", hidden, self.c)
        return x + (y * chosen.t().unsqueeze(-1)).sum(0).view_as(x)


class Mixer(nn.Module):
    """Feed-forward over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(9, 20), nn.Linear(20, 9), nn.LayerNorm(WIDTH)
        self.d, self.e = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(self.c(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.e(F.gelu(self.d(self.c(x))))


class LinearAttention(nn.Module):
    """Attention without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.elu(self.a(x)) + 1, F.elu(self.b(x)) + 1
        return x + self.d(q @ (k.transpose(1, 2) @ self.c(x)))


class Explicit(nn.Module):
    """softmax(q·kᵀ + bias)·v spelled out, the bias learned; a, b, c, d as in `Attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.e = nn.Embedding(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.e(torch.arange(x.shape[1]))
        scores = self.a(x) @ self.b(x).transpose(1, 2) / 8 + bias
        return x + self.d(torch.softmax(torch.tanh(scores), -1) @ self.c(x))


class StackedExperts(nn.Module):
    """Experts, one for each sample, and nothing around them."""

    def __init__(self, number: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(number, width, 96))
        self.b = nn.Parameter(torch.randn(number, 96, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, self.a)), self.b)


class FeedForward(nn.Module):
    """x + down(gelu(up(x))), with names that say so."""

    def __init__(self, width: int = WIDTH, wide: int = 2 * WIDTH, biased_down: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width, bias=biased_down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))
