"""Small models of eight families in plain torch, with points inside at which graphs can be broken.

Every model has an embedding or a patch stem in front, `LAYERS` blocks, and a head behind. Sizes are no
multiples of 32: every cast has a short last block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, FFN, WORDS, LENGTH = 3, 40, 2, 72, 50, 7
BROKEN: set[str] = set()
"""Points at which the graph breaks, of those that `point` names."""
POINTS: set[str] = set()
"""The points that were passed."""


def point(name: str) -> None:
    """A place in the code where the graph can be broken."""
    if torch.compiler.is_compiling():
        if name in BROKEN:
            torch._dynamo.graph_break()
    else:
        POINTS.add(name)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, and the inputs it is called with."""

    model: nn.Module
    inputs: tuple[Tensor, ...]


class Attention(nn.Module):
    """Of `x` to itself, or to `other`. kv_heads: fewer than heads are shared."""

    def __init__(self, kv_heads: int = HEADS, causal: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.causal, self.fused, self.kv_heads, self.size = causal, fused, kv_heads, WIDTH // HEADS
        keys = kv_heads * self.size
        if fused:
            self.qkv = nn.Linear(WIDTH, WIDTH + 2 * keys)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=False)
            self.k = nn.Linear(WIDTH, keys, bias=False)
            self.v = nn.Linear(WIDTH, keys, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        keys = self.kv_heads * self.size
        if self.fused:
            parts = self.qkv(x).split([WIDTH, keys, keys], dim=-1)
        else:
            parts = self.q(x), self.k(other), self.v(other)
        point("projected")
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(HEADS // self.kv_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        point("attended")
        return self.o(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], gated: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.act = act
        self.gate = nn.Linear(WIDTH, FFN, bias=bias) if gated else None
        self.up, self.down = nn.Linear(WIDTH, FFN, bias=bias), nn.Linear(FFN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        point("activated")
        return self.down(y)


class Experts(nn.Module):
    """Two of three experts for every token, with weights in one parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, WIDTH, FFN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(3, FFN, WIDTH) / FFN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept, which = torch.softmax(self.router(x), dim=-1).topk(2, dim=-1)
        point("routed")
        gates = torch.zeros(*x.shape[:-1], 3).scatter(-1, which, kept).flatten(0, -2)
        y = torch.bmm(F.silu(torch.bmm(x.flatten(0, -2).expand(3, -1, -1), self.up)), self.down)
        return (y * gates.t().unsqueeze(-1)).sum(0).view_as(x)


class Mixer(nn.Module):
    """A gated linear recurrence with constant decay, as a sum over the past."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.conv = nn.Conv1d(FFN, FFN, 3, padding=2, groups=FFN)
        self.step = nn.Linear(FFN, FFN)
        self.out = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.inner(x).chunk(2, dim=-1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        point("convolved")
        return self.out(torch.cumsum(F.softplus(self.step(y)) * y, dim=1) * F.silu(gate))


class Block(nn.Module):
    """Pre-norm; post-norm for `post`. mixer, feed: what is in it. cross: attention to a memory."""

    def __init__(
        self, norm: Callable[[], nn.Module], mixer: nn.Module, feed: nn.Module, *,
        post: bool = False, cross: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.post, self.mixer, self.feed = post, mixer, feed
        self.norm1, self.norm2 = norm(), norm()
        self.cross, self.norm3 = (Attention(), norm()) if cross else (None, None)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.post:
            x = self.norm1(x + self.mixer(x))
            point("between")
            return self.norm2(x + self.feed(x))
        x = x + self.mixer(self.norm1(x))
        point("between")
        if self.cross is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.feed(self.norm2(x))


class Adaptive(nn.Module):
    """A block whose norms are shifted, scaled and gated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.modulate = nn.Linear(WIDTH, 6 * WIDTH)
        self.attention, self.feed = Attention(fused=True), FeedForward(F.gelu, bias=True)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulate(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        point("modulated")
        x = x + c * self.attention(F.layer_norm(x, (WIDTH,)) * (1 + a) + b)
        return x + f * self.feed(F.layer_norm(x, (WIDTH,)) * (1 + d) + e)


def _rms() -> nn.Module:
    return nn.RMSNorm(WIDTH)


def _layer() -> nn.Module:
    return nn.LayerNorm(WIDTH)


class Decoder(nn.Module):
    """Tokens in, logits out. positions: learned. tied: head and embedding share their weight."""

    def __init__(self, block: Callable[[int], Block], norm: Any, *, positions: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH)) if positions else None
        self.blocks = nn.ModuleList(map(block, range(LAYERS)))
        self.norm = norm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions
        point("embedded")
        for block in self.blocks:
            x = block(x)
        point("done")
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """BERT's: a transformed state per token, and the tied decoder's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), _layer()
        self.layer = nn.ModuleList(
            Block(_layer, Attention(), FeedForward(F.gelu, bias=True), post=True) for _ in range(LAYERS)
        )
        self.transform, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        for layer in self.layer:
            x = layer(x)
        point("encoded")
        y = F.gelu(self.transform(x))
        point("transformed")
        return self.decoder(y)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(
            Block(_layer, Attention(fused=True), FeedForward(F.gelu, bias=True)) for _ in range(LAYERS)
        )
        self.norm, self.head = _layer(), nn.Linear(WIDTH, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        point("patched")
        for block in self.blocks:
            x = block(x)
        point("pooled")
        return self.head(self.norm(x)[:, 0])


class Translator(nn.Module):
    """T5's: an encoder, and a decoder that attends to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block(_rms, Attention(), FeedForward(F.relu)) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(
            Block(_rms, Attention(causal=True), FeedForward(F.relu), cross=True) for _ in range(LAYERS)
        )
        self.norm, self.head = _rms(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        memory = self.embed(ids)
        for block in self.encoder:
            memory = block(memory)
        point("encoded")
        x = self.embed(targets)
        for block in self.decoder:
            x = block(x, memory)
        point("decoded")
        return self.head(self.norm(x))


class Diffusion(nn.Module):
    """DiT's: noisy patches and a time step in, noise out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, WIDTH)
        self.time1, self.time2 = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Adaptive() for _ in range(LAYERS))
        self.modulate, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.arange(8)
        condition = self.time2(F.silu(self.time1(torch.cat([angles.sin(), angles.cos()], dim=-1))))
        x = self.stem(x)
        point("conditioned")
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulate(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        point("shifted")
        return self.out(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)


def _ids(seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _llama(_: int) -> Block:
    return Block(_rms, Attention(kv_heads=1, causal=True), FeedForward(F.silu, gated=True))


def _gpt(_: int) -> Block:
    return Block(_layer, Attention(causal=True, fused=True), FeedForward(F.gelu, bias=True))


def _moe(_: int) -> Block:
    return Block(_rms, Attention(causal=True), Experts())


def _hybrid(index: int) -> Block:
    return Block(_rms, Attention(causal=True) if index == 1 else Mixer(), FeedForward(F.silu, gated=True))


FAMILIES: dict[str, Callable[[], Family]] = {
    "llama": lambda: Family(model=Decoder(_llama, _rms, positions=False, tied=False), inputs=(_ids(),)),
    "gpt2": lambda: Family(model=Decoder(_gpt, _layer, positions=True, tied=True), inputs=(_ids(),)),
    "bert": lambda: Family(model=Encoder(), inputs=(_ids(),)),
    "vit": lambda: Family(model=Vision(), inputs=(_values(3, 3, 12, 12),)),
    "t5": lambda: Family(model=Translator(), inputs=(_ids(), _ids(2))),
    "moe": lambda: Family(model=Decoder(_moe, _rms, positions=False, tied=False), inputs=(_ids(),)),
    "hybrid": lambda: Family(model=Decoder(_hybrid, _rms, positions=False, tied=False), inputs=(_ids(),)),
    "dit": lambda: Family(model=Diffusion(), inputs=(_values(3, 9, 12), torch.tensor([3.0, 40.0, 7.0]))),
}


def build(name: str) -> Family:
    torch.manual_seed(0)
    return FAMILIES[name]()
