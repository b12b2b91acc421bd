"""Structures of a few lines each, whose names say nothing, and a quick way to the roles of their layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from by_hand import Position
from helpers.made import Made
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from mxcompile.compiler.session.decompositions import table
from mxcompile.graph.tags import GemmTag, tags_of
from mxcompile.models.names import GraphInput
from mxcompile.passes.classify import Classify
from mxcompile.passes.decide import Decide
from mxcompile.passes.find import Find
from mxcompile.policy import Policy

WIDTH, LENGTH = 32, 7
PRODUCTS = frozenset({"aten.bmm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"})
"""What products of activations are called here."""


@dataclasses.dataclass
class _Origin:
    """What AOTAutograd says of an input: the name of a parameter."""

    target: str


def tags(model: nn.Module, *args: Tensor, policy: Any = None, **cuts: bool) -> dict[str, GemmTag]:
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
        node.meta["desc"] = Position(index)
    inputs = tuple(GraphInput() for _ in args)
    Find(inputs=inputs).apply(traced.graph)
    Classify(inputs=inputs, **cuts).apply(traced.graph)
    if policy is not None:
        Decide(policy=Policy.from_dict(policy) if isinstance(policy, dict) else policy).apply(traced.graph)
    return {tag.name or str(node.target): tag for node in traced.graph.nodes for tag in tags_of(node)}


def roles(model: nn.Module, *args: Tensor) -> dict[str, str]:
    """Layer → role, of the layers that have a name."""
    tag_by_name = tags(model, *args)
    return {name: str(tag.role) for name, tag in tag_by_name.items() if name not in PRODUCTS}


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, LENGTH, WIDTH)))


def linear(count: int, n: int = WIDTH, k: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(k, n) for _ in range(count))


class Body(Made, a=(WIDTH, 3 * WIDTH), b=(3 * WIDTH, WIDTH)):
    """x + f(norm(x)) with a feed-forward network: the least that makes a residual stream. a, b."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(F.rms_norm(x, (WIDTH,)))))


BODY = {"a": "ffn_in", "b": "ffn_out"}


def below(prefix: str, roles_of_body: dict[str, str] = BODY) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in roles_of_body.items()}


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


class Talking(Made, a=lambda: linear(4), before=(4, 4), after=(4, 4)):
    """Attention whose scores a linear layer over the heads mixes, before and after the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.a[:3])
        scores = self.before((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        mixed = self.after(torch.softmax(scores, -1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.a[3]((mixed @ v).transpose(1, 2).flatten(2))


class Headed(Made, body=Body, mlp=lambda: linear(3)):
    """A body and, on its stream, a network of three layers; added to the stream or not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        first, second, third = self.mlp
        y = third(F.relu(second(F.relu(first(x)))))
        return x + y if self.joins else torch.sigmoid(y)


class Modulated(
    Made, time=lambda: linear(2), inner=(WIDTH, 2 * WIDTH), body=Body, a=(WIDTH, 64), b=(64, WIDTH)
):
    """A body between a scale and a gate made from a time step by two layers and one of its own."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first, second = self.time
        scale, gate = self.inner(F.silu(second(F.silu(first(time.cos()))))).unsqueeze(1).chunk(2, -1)
        x = self.body(x)
        return x + gate * self.b(F.gelu(self.a(F.rms_norm(x, (WIDTH,)) * (1 + scale))))


class Squeezed(Made, body=Body, gate=lambda: linear(2)):
    """Channels gated by what two layers make of the mean over tokens, or of every token by itself."""

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
        u, gate, decay = (layer(x) for layer in self.a[:3])
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


class Queried(nn.Module):
    """Attention whose queries a layer makes of one token, copied for every sample, or of zeros.

    to_q, with a bias for zeros; a: k, v, out.
    """

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH)) if not zeros else None
        self.to_q, self.a = nn.Linear(WIDTH, WIDTH, bias=zeros), linear(3)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], 1, WIDTH)
        token = self.token.expand(shape) if self.token is not None else torch.zeros(shape)
        k, v, out = self.a
        return token + out(attend(self.to_q(token), k(x), v(x), 4, True))


class Updated(nn.Module):
    """A body whose first weight is stored as a matrix and a product of two narrow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.up, self.down = nn.Parameter(torch.randn(3 * WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.body.a, self.body.b
        weight = a.weight + self.up @ self.down
        return x + b(F.gelu(F.linear(F.rms_norm(x, (WIDTH,)), weight, a.bias)))


class Scaled(nn.Module):
    """Attention whose queries are made in two steps; in between, positions are multiplied in or put beside.

    a: the first step, k, v, out. b: the second step. position: makes what is multiplied in or put beside.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.how, self.position = linear(4), how, linear(1)[0]
        self.b = nn.Linear(2 * WIDTH if how == "beside" else WIDTH, WIDTH)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        y = F.rms_norm(x, (WIDTH,))
        first, k, v, out = self.a
        inner, position = first(y), torch.sin(self.position(where))
        if self.how == "beside":
            inner = torch.cat([inner, position], -1)
        elif self.how == "times":
            inner = inner * position
        return x + out(attend(self.b(inner), k(y), v(y), 4, False))


class TalkingOnTop(Made, a=lambda: linear(4), mix=lambda: nn.Conv2d(4, 4, 1, bias=False)):
    """Attention whose scores get a mix of the heads' scores added, by a pointwise convolution."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in self.a[:3])
        scores = q @ k.transpose(-1, -2)
        return x + self.a[3]((torch.softmax(scores + self.mix(scores), -1) @ v).transpose(1, 2).flatten(2))


class Pixels(Made, a=lambda: nn.Conv2d(4, 8, 1), b=lambda: nn.Conv2d(8, 4, 1)):
    """A network of two pointwise convolutions that is added to the image, whose shape is that of scores."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)))


class Cached(nn.Module):
    """A gated short filter; what the next step needs of its input is given back beside the result. a, b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, value = self.a(F.rms_norm(x, (WIDTH,))).transpose(1, 2).chunk(3, 1)
        product = first * value
        mixed = second * self.filter(product)[..., : x.shape[1]]
        return x + self.b(mixed.transpose(1, 2)), product[..., -2:]


class Receptive(nn.Module):
    """A network whose result another layer gates before it joins the stream. a, b, gate."""

    def __init__(self, activated: bool) -> None:
        super().__init__()
        self.body, self.activated = Body(), activated
        self.a, self.b, self.gate = linear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        y = self.a(x)
        return x + torch.sigmoid(self.gate(x)) * self.b(F.relu(y) if self.activated else y)


class SoftMixture(nn.Module):
    """Experts, stacks of matrices, over weighted means of all tokens; weights put them together again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.slots = Body(), nn.Parameter(torch.randn(WIDTH, 2, 3))
        self.a = nn.Parameter(torch.randn(2, WIDTH, 48))
        self.b = nn.Parameter(torch.randn(2, 48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        scores = (x @ self.slots.flatten(1)).unflatten(-1, (2, 3))
        taken = torch.einsum("bnd,bnes->ebsd", x, scores.softmax(1)).flatten(1, 2)
        experts = torch.bmm(F.gelu(torch.bmm(taken, self.a)), self.b).unflatten(1, (x.shape[0], 3))
        weights = scores.flatten(2).softmax(-1).unflatten(-1, (2, 3))
        return x + torch.einsum("ebsd,bnes->bnd", experts, weights)


class Tower(Made, body=lambda: nn.ModuleList([Body(), Body()])):
    """Two bodies, of which the first one's result is the model's: nothing reads the second's."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.body[0](x)
        self.body[1](kept)
        return kept


class Meeting(nn.Module):
    """Two streams: what starts the second reads tokens that are the first one's, too. start, a, b."""

    def __init__(self, streams: bool) -> None:
        super().__init__()
        self.body, self.start, self.a, self.b, self.streams = Body(), *linear(3), streams

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.body(x), self.start(y)
        if not self.streams:
            return x + self.b(F.gelu(self.a(x * y)))
        y = y + self.b(F.gelu(self.a(y + x)))
        return y + self.b(F.gelu(self.a(y)))
