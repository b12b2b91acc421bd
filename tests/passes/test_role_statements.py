"""Every statement about a role fires on its structure and not on its neighbour, and says why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.blocks import StackedExperts
from helpers.made import Made
from helpers.reports import EVERYTHING
from probes import (
    ATTENTION,
    LENGTH,
    PRODUCTS,
    WIDTH,
    Attention,
    Biased,
    Body,
    Cached,
    Headed,
    Meeting,
    Mixer,
    Modulated,
    Pixels,
    Pooled,
    Queried,
    Receptive,
    Routed,
    Scaled,
    SoftMixture,
    Squeezed,
    Talking,
    TalkingOnTop,
    Tower,
    Updated,
    attend,
    below,
    linear,
    roles,
    tags,
    tokens,
)
from torch import nn

from mxcompile.passes.roles.precedence import STATEMENTS
from mxcompile.passes.roles.statement import Holds, Statement


@pytest.mark.parametrize(("model", "names"), [(Pooled(True), ["query"]), (Talking(), ["before", "after"])])
def test_no_rule_reaches_queries_and_mixes_of_scores(model: nn.Module, names: list[str]):
    layer_tags = tags(model, tokens(), policy=EVERYTHING)
    for name, tag in layer_tags.items():
        assert tag.choice is not None
        assert (str(tag.choice.precision) == "mxfp8") == (name not in names and name not in PRODUCTS), name
    assert all("no linear layer but" in layer_tags[name].evidence.holds for name in names)


def test_a_head_is_never_inferred_from_a_cut():
    layer_tags = tags(Headed(joins=False), tokens(), is_cut=True)
    assert {str(layer_tags[f"mlp.{i}"].role) for i in range(3)} == {"other"}
    assert "the graph is cut" in layer_tags["mlp.2"].evidence.holds
    assert {name: str(layer_tags[name].role) for name in below("body")} == below("body")


def test_an_embedding_is_never_inferred_from_a_cut():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Body())
    assert roles(model, tokens()) == {"0": "embedding", **below("1")}
    layer_tags = tags(model, tokens(), is_cut=True)
    assert (str(layer_tags["0"].role), str(layer_tags["1.a"].role)) == ("other", "ffn_in")
    assert "the graph is cut" in layer_tags["0"].evidence.holds


@pytest.mark.parametrize("pooled", [True, False])
def test_a_gate_is_conditioning_where_it_is_broadcast(pooled: bool):
    assert (roles(Squeezed(pooled=pooled), tokens())["gate.1"] == "conditioning") is pooled


def test_a_top_k_whose_choice_is_unused_is_nearly_a_router():
    tag = tags(Routed(False), tokens())["scores"]
    assert str(tag.role) == "head"
    unused = "router: its result enters a top-k; but no later layer uses the choice of the top-k"
    assert tag.evidence.nearest == unused


def test_evidence_names_the_layers_it_rests_on():
    layer_tags = tags(Body(), tokens())
    assert layer_tags["b"].evidence.holds == (
        "it reads a through an activation or a gate; its result joins the residual stream"
    )
    assert layer_tags["a"].evidence.holds == "b reads its result through an activation or a gate"


def test_product_of_parameters_that_makes_a_weight_is_not_a_layer():
    layer_tags = tags(Updated(), tokens())
    assert {str(tag.role) for name, tag in layer_tags.items() if tag.k == 4} == {"other"}
    assert {str(tag.kind) for name, tag in layer_tags.items() if tag.k == 4} == {"Kind.PRODUCT"}
    assert [str(tag.role) for tag in layer_tags.values() if tag.k != 4] == ["ffn_in", "ffn_out"]


@pytest.mark.parametrize(("activated", "role"), [(True, "ffn_in"), (False, "other")])
def test_a_gate_on_a_network_belongs_to_it(activated: bool, role: str):
    layer_roles = roles(Receptive(activated), tokens())
    assert layer_roles["gate"] == role
    assert (layer_roles["b"] == "ffn_out") is activated


class _Rotated(nn.Module):
    """A feed-forward network whose last layer's input a block-diagonal matrix rotates, as in PEFT's OFT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.blocks = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(x)).unflatten(-1, (4, 16))
        return x + self.down(torch.einsum("...bi,bio->...bo", inner, self.blocks).flatten(-2))


def test_a_block_diagonal_matrix_does_not_make_its_neighbours_experts():
    layer_roles = roles(_Rotated(), tokens())
    assert {name: layer_roles[name] for name in ("up", "down")} == {"up": "ffn_in", "down": "ffn_out"}


class _FusedExperts(Made, gate=(WIDTH, 4), up=(WIDTH, 4 * 16)):
    """Experts that all run for each token; one layer with an activation holds their first layers."""

    def __init__(self, combine: str) -> None:
        super().__init__(combine=combine, down=nn.Parameter(torch.randn(4, 16, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(x)).unflatten(-1, (4, 16))
        results, gates = torch.einsum("btef,efd->bted", inner, self.down), self.gate(x).softmax(-1)
        if self.combine == "product":
            return x + torch.einsum("bte,bted->btd", gates, results)
        return x + (results.mean(-2) if self.combine == "mean" else (gates[..., None] * results).sum(-2))


@pytest.mark.parametrize("combine", ["sum", "product", "mean"])
def test_experts_whose_first_layers_are_one_are_experts(combine: str):
    layer_roles = roles(_FusedExperts(combine), tokens())
    assert {name: layer_roles[name] for name in ("up", "down")} == {"up": "expert_in", "down": "expert_out"}


class _Best(nn.Module):
    """Scores whose maximum is taken: for where it is, which picks a weight, or for its value alone."""

    def __init__(self, picks: bool) -> None:
        super().__init__()
        self.body, self.scores, self.picks = Body(), nn.Linear(WIDTH, 4), picks
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        rows = x.reshape(-1, WIDTH, 1)
        best, index = self.scores(rows.squeeze(-1)).max(-1)
        chosen = index if self.picks else torch.arange(len(rows)) % 4
        y = torch.bmm(self.down[chosen], torch.nn.functional.silu(torch.bmm(self.up[chosen], rows)))
        return x + (y * torch.sigmoid(best).view(-1, 1, 1)).view_as(x)


@pytest.mark.parametrize("picks", [False, True])
def test_the_place_of_a_maximum_routes_and_its_value_does_not(picks: bool):
    layer_roles = roles(_Best(picks), tokens())
    assert (layer_roles["scores"] == "router") == picks
    assert (layer_roles["up"], layer_roles["down"]) == ("expert_in", "expert_out")


class _Divided(nn.Module):
    """Attention whose queries layers make of the tokens that a top-k chose, put back in their order."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.body, self.scores, self.eager = Body(), nn.Linear(WIDTH, 4), eager
        self.q, self.k, self.v, self.out = linear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        rows = x.reshape(-1, WIDTH)
        weight, index = torch.softmax(self.scores(rows), -1).topk(1)
        order = index.squeeze(-1).argsort()
        mixed = self.q(rows[order]) * weight[order]
        q = torch.zeros_like(rows).index_add(0, order, mixed).view_as(x)
        return x + self.out(attend(q, self.k(x), self.v(x), 4, self.eager))


class _Smoothed(nn.Module):
    """A layer behind a body, and x + convolution(x) on what it makes; `reads`: another layer reads that."""

    def __init__(self, reads: bool, taps: int = 3) -> None:
        super().__init__()
        self.body, self.a = Body(), nn.Linear(WIDTH, 6)
        self.filter = nn.Conv1d(6, 6, taps, padding=taps // 2)
        self.b = nn.Linear(6, 5) if reads else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.body(x)).transpose(1, 2)
        return self.b((y + self.filter(y)).transpose(1, 2))


class _Shifted(Made, a=lambda: linear(4)):
    """Attention that takes the maximum off its scores by itself, as those with a sink do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, out = self.a
        scores = q(x) @ k(x).transpose(-1, -2)
        return x + out(torch.softmax(scores - scores.max(-1, keepdim=True).values, -1) @ v(x))


class _Alone(
    Made, kv=lambda: linear(2), classes=(WIDTH, 5), query=lambda: nn.Parameter(torch.randn(3, WIDTH))
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (layer(x) for layer in self.kv)
        return self.classes(torch.softmax(self.query @ k.transpose(1, 2), -1) @ v)


class _Weighted(Made, a=lambda: linear(3)):
    """A sum of values weighted by exponentials of keys, over the sum of the weights, step by step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value, out = self.a
        k, v = torch.exp(key(x)), value(x)
        above, below_, steps = k[:, 0] * v[:, 0], k[:, 0], []
        for step in range(1, x.shape[1]):
            above, below_ = above + k[:, step] * v[:, step], below_ + k[:, step]
            steps.append(above / below_)
        return x + out(torch.stack([steps[0], *steps], 1))


X, IDS = tokens(), torch.arange(LENGTH)[None]
POOL = {"query": "attn_scores", "classes": "head"}
KEYS = {"kv.0": "qkv", "kv.1": "qkv"}
QUERIED = {"to_q": "qkv", "a.0": "qkv", "a.1": "qkv", "a.2": "attn_out"}
MIXER = {**{f"a.{i}": "mixer_in" for i in range(3)}, "a.3": "mixer_out"}
TABLE = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, WIDTH), Body())
CONDITIONING = dict.fromkeys(("time.0", "time.1", "inner"), "conditioning")
ROUTED = {**below("body"), "scores": "router", "q": "qkv", "k": "qkv", "v": "qkv", "out": "attn_out"}
BLOCKS = {name: role for i in range(3) for name, role in below(f"blocks.{i}", ATTENTION).items()}
WAYS = {"spelled out": True, "in one operator": False}
ROLES: dict[str, tuple[Any, ...]] = {
    **{f"attention of {n} heads {way}": (Attention(n, WAYS[way]), ATTENTION) for way in WAYS for n in (1, 4)},
    **{f"attention of {n} tokens": (Attention(1), ATTENTION, tokens(n, n, WIDTH)) for n in (1, 5)},
    **{f"a bias of all attentions {way}": (Biased(WAYS[way]), BLOCKS, X, IDS[0]) for way in WAYS},
    **{f"queries of chosen tokens {way}": (_Divided(WAYS[way]), ROUTED) for way in WAYS},
    **{f"queries of zeros {zeros}": (Queried(zeros), QUERIED) for zeros in (True, False)},
    **{f"tokens mixed by a {kind}": (Mixer(kind), MIXER) for kind in ("product", "cumsum", "recurrence")},
    "classes behind a pool": (Pooled(False), below("body") | POOL),
    "classes behind a pool of keys and values": (Pooled(True), below("body") | KEYS | POOL),
    "classes behind a pool without a body": (_Alone(), KEYS | POOL),
    "mixes of scores": (Talking(), {**ATTENTION, "before": "attn_scores", "after": "attn_scores"}),
    "a mix that is added to scores": (TalkingOnTop(), {**ATTENTION, "mix": "attn_scores"}),
    "a network on the stream": (Headed(joins=False), below("body") | {f"mlp.{i}": "head" for i in range(3)}),
    "a network that joins the stream": (
        Headed(joins=True), below("body") | {"mlp.0": "ffn_in", "mlp.1": "ffn_in", "mlp.2": "ffn_out"}
    ),
    "layers between a table and the stream": (TABLE, {"1": "embedding", "3": "embedding", **below("4")}, IDS),
    "scales and gates from outside": (
        Modulated(), {**below("body"), **CONDITIONING, "a": "ffn_in", "b": "ffn_out"}, X, tokens(2, WIDTH)
    ),
    "pointwise convolutions on an image": (Pixels(), {"a": "ffn_in", "b": "ffn_out"}, tokens(2, 4, 7, 7)),
    "layers whose results nobody reads": (Tower(), below("body.0") | below("body.1")),
    "all inputs of a recurrence": (_Weighted(), {"a.0": "mixer_in", "a.1": "mixer_in", "a.2": "mixer_out"}),
    "a maximum whose place nobody reads": (_Shifted(), ATTENTION),
}  # fmt: skip
"""By name, the model, the roles of all its layers, and its inputs if they are not `X`."""

SECOND = {"b": "qkv", "a.1": "qkv", "a.2": "qkv", "a.3": "attn_out"}
AMONG: dict[str, tuple[Any, ...]] = {
    "a top-k whose choice is used": (Routed(True), {"scores": "router", "a": "expert_in"}),
    "the first of two steps": (Scaled("alone"), {**SECOND, "a.0": "qkv"}, X, tokens()),
    "a first step that positions multiply": (Scaled("times"), {**SECOND, "a.0": "other"}, X, tokens()),
    "a first step that positions stand beside": (Scaled("beside"), {**SECOND, "a.0": "other"}, X, tokens()),
    "a filter's state for the next step": (Cached(), {"a": "mixer_in", "b": "mixer_out"}),
    "experts among whom a softmax divides tokens": (SoftMixture(), {"a": "expert_in", "b": "expert_out"}),
    "a layer that starts a stream": (Meeting(True), {"start": "embedding"}, X, tokens()),
    "a layer that starts no stream": (Meeting(False), {"start": "conditioning"}, X, tokens()),
    **{f"the end, a filter of {n}": (_Smoothed(False, n), below("body") | {"a": "head"}) for n in (1, 3)},
    **{f"behind a filter of {n}": (_Smoothed(True, n), {"a": "embedding", "b": "head"}) for n in (1, 3)},
}
"""The same for models of which some layers count."""


@pytest.mark.parametrize("name", ROLES)
def test_roles_of_all_layers_follow_from_the_structure(name: str):
    model, expected, *inputs = ROLES[name]
    assert roles(model, *(inputs or [X])) == expected


@pytest.mark.parametrize("name", AMONG)
def test_roles_of_some_layers_follow_from_the_structure(name: str):
    model, expected, *inputs = AMONG[name]
    assert roles(model, *(inputs or [X])).items() >= expected.items()


class _Tied(Made, table=lambda: nn.Embedding(11, WIDTH), body=Body):
    """A body between a table and a head that is the same table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids)) @ self.table.weight.t()


def _neighbours() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Models that have, together, every role and what is nearly it."""
    x, ids = tokens(), torch.arange(LENGTH)[None]
    yield from (
        (model, x)
        for model in (Attention(), Headed(joins=False), Headed(joins=True), Mixer("product"), Routed(True))
    )
    yield from (
        (model, x) for model in (SoftMixture(), Squeezed(pooled=True), Squeezed(pooled=False), Routed(False))
    )
    yield nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)), x
    yield StackedExperts(len(x), WIDTH), x
    yield _Tied(), ids
    yield nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, WIDTH), Body()), ids


def test_every_statement_is_true_of_some_layer_and_false_of_another(monkeypatch):
    evaluate, seen = Statement.evaluate, defaultdict(set)

    def recorded(statement, site):
        answer = evaluate(statement, site)
        assert answer.says
        seen[statement].add(isinstance(answer, Holds))
        return answer

    monkeypatch.setattr(Statement, "evaluate", recorded)
    for model, x in _neighbours():
        roles(model, x)
    assert seen == {statement: {True, False} for statement in STATEMENTS}
