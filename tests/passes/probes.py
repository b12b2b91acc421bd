"""Structures of a few lines each, whose names say nothing, and a quick way to the roles of their layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mxcompile.compiler.decompositions import table
from mxcompile.graph.names import GraphInput
from mxcompile.graph.tags import GemmTag, tags_of
from mxcompile.passes.classify import Classify
from mxcompile.passes.decide import Decide
from mxcompile.passes.find import Find
from mxcompile.passes.roles.cuts import Cuts
from mxcompile.policy import Policy

WIDTH, LENGTH = 32, 7
PRODUCTS = frozenset({"aten.bmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"})
"""What products of activations are called here."""


@dataclasses.dataclass
class _Origin:
    """What AOTAutograd says of an input: the name of a parameter."""

    target: str


@dataclasses.dataclass
class _Position:
    idx: int


def tags(model: nn.Module, *args: Tensor, cuts: Cuts | None = None, policy: Any = None) -> dict[str, GemmTag]:
    """Layer → tag, of the forward of `model` called with `args`; other products under their operator."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def call(values: dict[str, Tensor], inputs: list[Tensor]) -> Any:
        return functional_call(model, values, tuple(inputs))

    with torch.no_grad():
        traced = make_fx(call, decomposition_table=table(), tracing_mode="fake")(state, list(args))
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, state, strict=False):
        node.meta["desc"] = _Origin(name)
    for index, node in enumerate(placeholders[len(state) :]):
        node.meta["desc"] = _Position(index)
    inputs = tuple(GraphInput() for _ in args)
    Find(inputs=inputs).apply(traced.graph)
    Classify(inputs=inputs, cuts=cuts or Cuts()).apply(traced.graph)
    if policy is not None:
        Decide(policy=Policy.from_dict(policy) if isinstance(policy, dict) else policy).apply(traced.graph)
    named = ((tag.name or str(node.target), tag) for node in traced.graph.nodes for tag in tags_of(node))
    return dict(named)


def roles(model: nn.Module, *args: Tensor, cuts: Cuts | None = None) -> dict[str, str]:
    """Layer → role, of the layers that have a name."""
    found = tags(model, *args, cuts=cuts)
    return {name: str(tag.role) for name, tag in found.items() if name not in PRODUCTS}


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, LENGTH, WIDTH)))


def linear(count: int, n: int = WIDTH, k: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(k, n) for _ in range(count))


class Body(nn.Module):
    """x + f(norm(x)) with a feed-forward network: the least that makes a residual stream. a, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(F.rms_norm(x, (WIDTH,)))))


BODY = {"a": "ffn_in", "b": "ffn_out"}


def below(prefix: str, found: dict[str, str] = BODY) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in found.items()}


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, eager: bool, bias: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ + bias)·v over heads, in one operator or spelled out."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    if not eager:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        y = torch.softmax(scores if bias is None else scores + bias, -1) @ v
    return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """x + attention, its q, k, v and output in `a`; `bias` is added to the scores of every call."""

    def __init__(self, heads: int = 4, eager: bool = False) -> None:
        super().__init__()
        self.a, self._heads, self._eager = linear(4), heads, eager

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, (WIDTH,))
        q, k, v, out = self.a
        return x + out(attend(q(y), k(y), v(y), self._heads, self._eager, bias))


ATTENTION = {"a.0": "qkv", "a.1": "qkv", "a.2": "qkv", "a.3": "attn_out"}


class Pooled(nn.Module):
    """A body, a pool by a query that is a parameter, and classes straight behind it."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.body, self.kv = Body(), linear(2) if projected else None
        self.query, self.classes = nn.Parameter(torch.randn(3, WIDTH)), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        k, v = (x, x) if self.kv is None else (layer(x) for layer in self.kv)
        return self.classes(torch.softmax(self.query @ k.transpose(1, 2), -1) @ v)


class Talking(nn.Module):
    """Attention whose scores a linear layer over the heads mixes, before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.before, self.after = linear(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.a[:3])
        scores = self.before((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.after(torch.softmax(scores, -1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.a[3]((mixed @ v).transpose(1, 2).flatten(2))


class Headed(nn.Module):
    """A body and, on its stream, a network of three layers; added to the stream or not."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.body, self.mlp, self.joins = Body(), linear(3), joins

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        first, second, third = self.mlp
        y = third(F.relu(second(F.relu(first(x)))))
        return x + y if self.joins else torch.sigmoid(y)


class Modulated(nn.Module):
    """A body between a scale and a gate made from a time step by two layers and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.own, self.body = linear(2), nn.Linear(WIDTH, 2 * WIDTH), Body()
        self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first, second = self.time
        scale, gate = self.own(F.silu(second(F.silu(first(time.cos()))))).unsqueeze(1).chunk(2, -1)
        x = self.body(x)
        return x + gate * self.b(F.gelu(self.a(F.rms_norm(x, (WIDTH,)) * (1 + scale))))


class Squeezed(nn.Module):
    """Channels gated by what two layers make of the mean over tokens, or of every token by itself."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.body, self.gate, self.pooled = Body(), linear(2), pooled

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        first, second = self.gate
        seen = x.mean(1, keepdim=True) if self.pooled else x
        return Body.forward(self.body, x * torch.sigmoid(second(F.relu(first(seen)))))


class Mixer(nn.Module):
    """Gated mixing over tokens, by the way `kind` says, and an output projection onto the stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind = linear(4), kind

    def forward(self, x: Tensor) -> Tensor:
        (
            u,
            gate,
            decay,
        ) = (layer(x) for layer in self.a[:3])
        if self.kind == "product":
            y = u @ (F.elu(decay).transpose(1, 2) @ u)
        elif self.kind == "cumsum":
            y = u * torch.exp(torch.cumsum(F.logsigmoid(decay), 1))
        else:
            state, states = torch.zeros_like(u[:, 0]), []
            for step in range(u.shape[1]):
                state = torch.sigmoid(decay)[:, step] * state + u[:, step]
                states.append(state)
            y = torch.stack(states, 1)
        return x + self.a[3](y * F.silu(gate))


class Routed(nn.Module):
    """Scores of which a top-k is taken; what it chose weights a network's result, or is the model's."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.body, self.scores, self.a, self.b = Body(), nn.Linear(WIDTH, 4), *linear(2)
        self.used = used

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x)
        best, index = self.scores(x).softmax(-1).topk(1)
        return x + best * self.b(F.silu(self.a(x))) if self.used else (best, index)


class Biased(nn.Module):
    """Attentions that all add one and the same learned bias to their scores."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(eager=eager) for _ in range(3))
        self.bias = nn.Embedding(LENGTH, LENGTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = self.bias(ids).expand(2, 4, LENGTH, LENGTH)
        for block in self.blocks:
            x = block(x, bias)
        return x
