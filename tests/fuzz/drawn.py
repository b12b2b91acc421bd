"""Models, policies and ways to compile, drawn from building blocks by a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTHS = (32, 40, 48, 64, 72, 96, 33, 50)
WRAPPERS = ("none", "none", "none", "checkpoint", "graph break", "split")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One case. wrapper: how the program is cut. real: compiled by Inductor, not only through the passes."""

    number: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    depth: int
    norm: str
    attention: str
    feed_forward: str
    stem: str
    tied: bool
    bias: bool
    wrapper: str
    training: bool
    dtype: str
    dynamic: bool | None
    shape: tuple[int, int]
    policy: Any
    real: bool

    @property
    def whole(self) -> bool:
        """Whether the program is compiled as one graph."""
        return self.wrapper in ("none", "checkpoint")


def draw(seed: int, number: int) -> Drawn:
    """Case `number` of `seed`."""
    r = Random(f"{seed}/{number}")
    width = r.choice(WIDTHS)
    heads = r.choice([h for h in (1, 2, 4) if width % h == 0])
    stem = r.choice(["tokens", "tokens", "features", "conv"])
    feed_forward = r.choice(["gelu", "relu", "swiglu", "fused swiglu", "experts"])
    dynamic = r.choice([None, None, None, None, False, False, True])
    depths = (1, 1, 1, 2, 2, 3) if feed_forward != "experts" else (1, 1, 2)
    return Drawn(
        number=number,
        width=width,
        heads=heads,
        kv_heads=r.choice([h for h in (1, 2, 4) if heads % h == 0]),
        ffn=r.choice((64, 80, 100, 129)),
        depth=r.choice(depths if not dynamic else (1, 1, 1, 1, 1, 2)),  # tracing sizes takes long
        norm=r.choice(["layer", "rms", "none"]),
        attention=r.choice(["separate", "fused", "eager", "module", "none"]),
        feed_forward=feed_forward,
        stem=stem,
        tied=stem == "tokens" and r.random() < 0.5,
        bias=r.random() < 0.5,
        wrapper=r.choice(WRAPPERS),
        training=r.random() < 0.75,
        dtype=r.choice(["float32"] * 6 + ["bfloat16", "autocast"]),
        dynamic=dynamic,
        shape=(r.choice((1, 2, 3)), r.choice((1, 2, 7, 16, 33))),
        policy=_policy(r),
        real=r.random() < 0.025,
    )


def _policy(r: Random) -> Any:
    if r.random() < 0.4:
        return r.choice(["nvidia", "ocp", "hybrid", "inference", "nvidia"])
    rules = [{"match": _match(r), "use": _use(r)} for _ in range(r.choice((1, 2)))]
    if len(rules) == 2 and rules[0]["match"] == rules[1]["match"]:
        rules.pop()
    return {"version": 1, "preset": r.choice(["nvidia", "bf16", "hybrid"]), "rules": rules}


def _match(r: Random) -> dict[str, Any]:
    return r.choice(
        [
            {"blocks": {"first": 1}},
            {"blocks": {"last": 1}, "role": ["ffn_in", "ffn_out"]},
            {"name": "blocks.0.*", "max_k": r.choice((40, 64))},
            {"name": r.choice(["*.down", "*.up", "head", "blocks.[01].attention.*"])},
            {"role": r.choice(["qkv", "attn_out", "ffn_in", "ffn_out", "head", "other", "router"])},
            {"min_k": 48, "max_n": 100},
            {"module": "Linear", "min_m": 8},
        ]
    )


def _use(r: Random) -> Any:
    return r.choice(
        [
            "mxfp8",
            "bf16",
            {"precision": "mxfp8", "rounding": r.choice(["floor", "ceil", "even"])},
            {"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "bf16", "grad_dtype": "e5m2"},
            {"precision": "mxfp8", "weight_block": "32x32"},
            {"precision": "mxfp8", "saved": "bf16"},
            {"fprop": "mxfp8"},
        ]
    )


def _norm(case: Drawn) -> nn.Module:
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return kinds[case.norm](case.width) if case.norm in kinds else nn.Identity()


class Attention(nn.Module):
    """Causal; eager spells its products out."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.case, self.size = case, case.width // case.heads
        keys = case.kv_heads * self.size
        if case.attention == "fused":
            self.qkv = nn.Linear(case.width, case.width + 2 * keys, bias=case.bias)
        else:
            self.q = nn.Linear(case.width, case.width, bias=case.bias)
            self.k = nn.Linear(case.width, keys, bias=case.bias)
            self.v = nn.Linear(case.width, keys, bias=case.bias)
        self.out = nn.Linear(case.width, case.width, bias=case.bias)

    def forward(self, x: Tensor) -> Tensor:
        case, keys = self.case, self.case.kv_heads * self.size
        if case.attention == "fused":
            parts = self.qkv(x).split([case.width, keys, keys], dim=-1)
        else:
            parts = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(case.heads // case.kv_heads, dim=1) for part in (k, v))
        if case.attention == "eager":
            y = torch.softmax(q @ k.transpose(-1, -2) / self.size**0.5, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention, whose weights are parameters of its own."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(case.width, case.heads, bias=case.bias, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class FeedForward(nn.Module):
    def __init__(self, case: Drawn, kind: str) -> None:
        super().__init__()
        self.kind = kind
        gated = 2 * case.ffn if kind == "fused swiglu" else case.ffn
        self.up = nn.Linear(case.width, gated, bias=case.bias)
        self.gate = nn.Linear(case.width, case.ffn, bias=case.bias) if kind == "swiglu" else None
        self.down = nn.Linear(case.ffn, case.width, bias=case.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        match self.kind:
            case "gelu":
                y = F.gelu(y)
            case "relu":
                y = F.relu(y)
            case "swiglu":
                y = F.silu(self.gate(x)) * y
            case _:
                a, b = y.chunk(2, dim=-1)
                y = F.silu(a) * b
        return self.down(y)


class Experts(nn.Module):
    """Two of three experts for every token; all are computed, and masked by the router."""

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.router = nn.Linear(case.width, 3, bias=False)
        self.experts = nn.ModuleList(FeedForward(case, "swiglu") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x).float(), dim=-1)
        kept, which = weights.topk(2, dim=-1)
        gates = torch.zeros_like(weights).scatter(-1, which, kept).to(x.dtype)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, case: Drawn) -> None:
        super().__init__()
        kinds = {"none": None, "module": TorchAttention}
        attention = kinds.get(case.attention, Attention)
        self.attention = attention(case) if attention else None
        self.norm1, self.norm2 = _norm(case), _norm(case)
        kind = case.feed_forward
        self.feed_forward = Experts(case) if kind == "experts" else FeedForward(case, kind)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    """Stem, blocks, head; `wrapper` is how blocks are called.

    Graph breaks are outside the loop: inside, Dynamo gives up the frame and compiles those of the blocks, and
    equal ones share one code.
    """

    def __init__(self, case: Drawn) -> None:
        super().__init__()
        self.case, self.wrapper = case, case.wrapper
        self.embed = nn.Embedding(60, case.width) if case.stem == "tokens" else None
        self.stem = nn.Conv1d(20, case.width, 3, padding=1) if case.stem == "conv" else None
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.depth))
        self.norm = _norm(case)
        self.head = nn.Linear(case.width, 60, bias=False)
        if case.tied:
            assert self.embed is not None
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        if self.stem is not None:
            x = self.stem(x).transpose(1, 2)
        if self.wrapper == "graph break":
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.wrapper == "checkpoint" else block(x)
        if self.wrapper == "graph break":
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


def build(case: Drawn) -> tuple[Model, Tensor]:
    """The model of `case` with its weights, and an input."""
    torch.manual_seed(case.number)
    model = Model(case)
    batch, length = case.shape
    match case.stem:
        case "tokens":
            x = torch.randint(0, 60, (batch, length))
        case "conv":
            x = torch.randn(batch, 20, length)
        case _:
            x = torch.randn(batch, length, case.width)
    if case.dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
    return model.train(case.training), x
