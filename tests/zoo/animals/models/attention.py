"""Transformers with attention in many spellings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(width: int = 96, hidden: int = 208) -> nn.Sequential:
    """A feed-forward network."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Block(nn.Module):
    """Pre-norm: attention, then a feed-forward network."""

    def __init__(self, attn: nn.Module, width: int = 96) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = attn, mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Features(nn.Module):
    """Blocks over features, then a head over every position."""

    def __init__(self, *blocks: nn.Module, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.layers(x)))


class _Packed(nn.Module):
    """nanoGPT's: one projection for q, k and v."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(rows, tokens, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, tokens, width))


class _NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(96), nn.LayerNorm(96)
        self.attn = _Packed(96, 6)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(96, 208), "c_proj": nn.Linear(208, 96)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class _Language(nn.Module):
    def __init__(self, blocks: list[nn.Module], norm: nn.Module, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(517, 96)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.lm_head = nn.Linear(96, 517, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def nano_gpt() -> nn.Module:
    """A decoder with its head tied to its embedding."""
    return _Language([_NanoBlock(), _NanoBlock()], nn.LayerNorm(96), tied=True)


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions as complex numbers, the way Llama's reference code has them."""
    angles = torch.outer(
        torch.arange(x.shape[1]).float(), 1e4 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    )
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


class TitanAttention(nn.Module):
    """torchtitan's: grouped queries, complex rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)
        self.wk, self.wv = nn.Linear(96, 32, bias=False), nn.Linear(96, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = _rotate(self.wq(x).view(rows, tokens, 6, 16))
        k = _rotate(self.wk(x).view(rows, tokens, 2, 16))
        v = self.wv(x).view(rows, tokens, 2, 16)
        k, v = (t.repeat_interleave(3, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(rows, tokens, -1))


class SwiGLU(nn.Module):
    """Gate, up and down under Llama's reference names."""

    def __init__(self, width: int = 96, hidden: int = 208) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    """torchtitan's block, with what `feed_forward` it is given."""

    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(96), nn.RMSNorm(96)
        self.attention, self.feed_forward = TitanAttention(), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A decoder whose layers are in a dict, keyed by their numbers."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(517, 96)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = nn.RMSNorm(96)
        self.output = nn.Linear(96, 517, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def titan_llama() -> nn.Module:
    """Llama as torchtitan has it."""
    return Titan(TitanBlock(SwiGLU()), TitanBlock(SwiGLU()))


class _Einsum(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.merge = (nn.Linear(96, 96) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.query, self.key, self.value))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        return self.merge(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


def einsum_transformer(heads: int = 6) -> nn.Module:
    """Attention by einsum."""
    return Features(Block(_Einsum(heads)), Block(_Einsum(heads)))


class _Torch(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(96, 37)

    def forward(self, *x: Tensor) -> Tensor:
        return self.out(self.inner(*x))


def torch_encoder() -> nn.Module:
    """PyTorch's own encoder."""
    layer = nn.TransformerEncoderLayer(96, 6, 208, batch_first=True, norm_first=True)
    return _Torch(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def torch_transformer() -> nn.Module:
    """PyTorch's own encoder and decoder."""
    return _Torch(nn.Transformer(96, 6, 1, 1, 208, batch_first=True))


class _Pool(nn.Module):
    """Attention with one learned query: no projection makes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 4, 1, width // 4))
        self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.to_k, self.to_v))
        weights = (self.query @ k.transpose(-2, -1) * k.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).flatten(1)


class Pooled(nn.Module):
    """A learned query pools, a classifier reads what it pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.classifier = _Pool(96), nn.Linear(96, 37)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(x))


class Reader(nn.Module):
    """Latents that are parameters read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(9, 96))
        self.to_q, self.to_kv, self.to_out = nn.Linear(96, 72), nn.Linear(40, 144), nn.Linear(72, 96)
        self.mlp, self.out = mlp(), nn.Linear(96, 37)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.to_kv(x).chunk(2, -1))
        q = self.to_q(latents).unflatten(-1, (4, -1)).transpose(1, 2)
        y = latents + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        y = y + self.mlp(y)
        return self.out(y.mean(1))


class _Linear(nn.Module):
    """elu(q)+1 and elu(k)+1 in place of a softmax: values summed over tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (6, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = k.transpose(-2, -1) @ v
        total = q @ k.sum(-2).unsqueeze(-1)
        return self.to_out((q @ state / total).transpose(1, 2).flatten(-2))


def linear_transformer() -> nn.Module:
    """Linear attention."""
    return Features(Block(_Linear()), Block(_Linear()))


class _Retention(nn.Module):
    """Scores with a decay and no softmax; the result normalised and gated."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.gate, self.to_out = (nn.Linear(96, 96) for _ in range(5))
        self.norm = nn.GroupNorm(6, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (6, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        decay = torch.where(distance >= 0, 0.9 ** distance.clamp(min=0).to(x.dtype), 0.0)
        y = (q @ k.transpose(-2, -1) * decay) @ v
        y = self.norm(y.transpose(1, 2).flatten(-2).transpose(1, 2)).transpose(1, 2)
        return self.to_out(F.silu(self.gate(x)) * y)


def retentive() -> nn.Module:
    """RetNet."""
    return Features(Block(_Retention()), Block(_Retention()))
