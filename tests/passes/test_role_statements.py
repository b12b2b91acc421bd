"""Every statement about a role fires on its structure and not on its neighbour, and says why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from helpers.blocks import StackedExperts
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
from mxcompile.passes.roles.statement import Statement


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_however_it_is_spelled(heads: int, eager: bool):
    assert roles(Attention(heads, eager), tokens()) == ATTENTION


@pytest.mark.parametrize("eager", [False, True])
def test_bias_shared_by_all_layers_is_not_a_residual_stream(eager: bool):
    layer_roles = roles(Biased(eager), tokens(), torch.arange(LENGTH))
    assert layer_roles == {k: v for i in range(3) for k, v in below(f"blocks.{i}", ATTENTION).items()}


@pytest.mark.parametrize("projected", [False, True])
def test_classes_straight_behind_an_attention_are_a_head(projected: bool):
    layer_roles = roles(Pooled(projected), tokens())
    keys = {"kv.0": "qkv", "kv.1": "qkv"} if projected else {}
    assert layer_roles == {**below("body"), **keys, "query": "attn_scores", "classes": "head"}


@pytest.mark.parametrize(("model", "names"), [(Pooled(True), ["query"]), (Talking(), ["before", "after"])])
def test_no_rule_reaches_queries_and_mixes_of_scores(model: nn.Module, names: list[str]):
    layer_tags = tags(model, tokens(), policy=EVERYTHING)
    for name, tag in layer_tags.items():
        assert tag.choice is not None
        quantized = str(tag.choice.precision) == "mxfp8"
        assert quantized == (name not in names and name not in PRODUCTS), name
    assert all("no linear layer but" in layer_tags[name].evidence.holds for name in names)


def test_talking_heads_keep_the_roles_of_the_attention():
    assert roles(Talking(), tokens()) == {**ATTENTION, "before": "attn_scores", "after": "attn_scores"}


@pytest.mark.parametrize("joins", [False, True])
def test_a_network_on_the_stream_is_a_head_unless_it_joins_the_stream(joins: bool):
    expected = ("ffn_in", "ffn_in", "ffn_out") if joins else ("head",) * 3
    layers = {f"mlp.{i}": role for i, role in enumerate(expected)}
    assert roles(Headed(joins), tokens()) == {**below("body"), **layers}


def test_a_head_is_never_inferred_from_a_cut():
    layer_tags = tags(Headed(False), tokens(), is_cut=True)
    assert {str(layer_tags[f"mlp.{i}"].role) for i in range(3)} == {"other"}
    assert "the graph is cut" in layer_tags["mlp.2"].evidence.holds
    assert {name: str(layer_tags[name].role) for name in below("body")} == below("body")


def test_an_embedding_is_never_inferred_from_a_cut():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Body())
    assert roles(model, tokens()) == {"0": "embedding", **below("1")}
    layer_tags = tags(model, tokens(), is_cut=True)
    assert (str(layer_tags["0"].role), str(layer_tags["1.a"].role)) == ("other", "ffn_in")
    assert "the graph is cut" in layer_tags["0"].evidence.holds


def test_layers_between_a_table_and_the_stream_are_embeddings():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, WIDTH), Body())
    assert roles(model, torch.arange(LENGTH)[None]) == {"1": "embedding", "3": "embedding", **below("4")}


def test_scales_and_gates_from_outside_have_role_conditioning():
    conditioning = dict.fromkeys(("time.0", "time.1", "inner"), "conditioning")
    layer_roles = roles(Modulated(), tokens(), tokens(2, WIDTH))
    assert layer_roles == {**below("body"), **conditioning, "a": "ffn_in", "b": "ffn_out"}


@pytest.mark.parametrize("pooled", [True, False])
def test_a_gate_is_conditioning_where_it_is_broadcast(pooled: bool):
    layer_roles = roles(Squeezed(pooled), tokens())
    assert (layer_roles["gate.1"] == "conditioning") is pooled


@pytest.mark.parametrize("kind", ["product", "cumsum", "recurrence"])
def test_layers_that_mix_tokens_without_softmax_have_mixer_roles(kind: str):
    layer_roles = roles(Mixer(kind), tokens())
    assert layer_roles == {"a.0": "mixer_in", "a.1": "mixer_in", "a.2": "mixer_in", "a.3": "mixer_out"}


def test_a_top_k_makes_a_router_where_its_choice_is_used():
    assert roles(Routed(True), tokens())["scores"] == "router"
    assert roles(Routed(True), tokens())["a"] == "expert_in"
    tag = tags(Routed(False), tokens())["scores"]
    assert str(tag.role) == "head"
    assert (
        tag.evidence.nearest
        == "router: its result enters a top-k; but no later layer uses the choice of the top-k"
    )


def test_evidence_names_the_layers_it_rests_on():
    layer_tags = tags(Body(), tokens())
    assert layer_tags["b"].evidence.holds == (
        "it reads a through an activation or a gate; its result joins the residual stream"
    )
    assert layer_tags["a"].evidence.holds == "b reads its result through an activation or a gate"


@pytest.mark.parametrize("size", [1, 5])
def test_roles_do_not_depend_on_sizes(size: int):
    assert roles(Attention(1), tokens(size, size, WIDTH)) == ATTENTION


@pytest.mark.parametrize("zeros", [False, True])
def test_query_layer_without_data_input_has_role_qkv(zeros: bool):
    assert roles(Queried(zeros), tokens()) == {"to_q": "qkv", "a.0": "qkv", "a.1": "qkv", "a.2": "attn_out"}


def test_product_of_parameters_that_makes_a_weight_is_not_a_layer():
    layer_tags = tags(Updated(), tokens())
    assert {str(tag.role) for name, tag in layer_tags.items() if tag.k == 4} == {"other"}
    assert {str(tag.kind) for name, tag in layer_tags.items() if tag.k == 4} == {"Kind.PRODUCT"}
    assert [str(tag.role) for tag in layer_tags.values() if tag.k != 4] == ["ffn_in", "ffn_out"]


@pytest.mark.parametrize(("how", "role"), [("alone", "qkv"), ("times", "other"), ("beside", "other")])
def test_the_first_step_of_two_is_one_only_where_nothing_else_comes_in(how: str, role: str):
    layer_roles = roles(Scaled(how), tokens(), tokens())
    assert layer_roles["a.0"] == role
    assert {name: layer_roles[name] for name in ("b", "a.1", "a.2", "a.3")} == {
        **dict.fromkeys(("b", "a.1", "a.2"), "qkv"),
        "a.3": "attn_out",
    }


def test_a_mix_that_is_added_to_the_scores_starts_no_stream():
    assert roles(TalkingOnTop(), tokens()) == {**ATTENTION, "mix": "attn_scores"}


def test_pointwise_convolutions_on_an_image_are_a_network():
    assert roles(Pixels(), tokens(2, 4, 7, 7)) == {"a": "ffn_in", "b": "ffn_out"}


def test_classes_behind_a_pool_are_a_head_without_a_body_too():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv, self.classes = linear(2), nn.Linear(WIDTH, 5)
            self.query = nn.Parameter(torch.randn(3, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k, v = (layer(x) for layer in self.kv)
            return self.classes(torch.softmax(self.query @ k.transpose(1, 2), -1) @ v)

    expected = {"kv.0": "qkv", "kv.1": "qkv", "query": "attn_scores", "classes": "head"}
    assert roles(Alone(), tokens()) == expected


def test_filter_state_for_the_next_step_is_not_a_head():
    layer_roles = roles(Cached(), tokens())
    assert {name: layer_roles[name] for name in ("a", "b")} == {"a": "mixer_in", "b": "mixer_out"}


@pytest.mark.parametrize(("activated", "role"), [(True, "ffn_in"), (False, "other")])
def test_a_gate_on_a_network_belongs_to_it(activated: bool, role: str):
    layer_roles = roles(Receptive(activated), tokens())
    assert layer_roles["gate"] == role
    assert (layer_roles["b"] == "ffn_out") is activated


def test_experts_among_whom_a_softmax_divides_tokens():
    layer_roles = roles(SoftMixture(), tokens())
    assert {name: layer_roles[name] for name in ("a", "b")} == {"a": "expert_in", "b": "expert_out"}


class _Rotated(nn.Module):
    """A feed-forward network whose last layer's input a block-diagonal matrix rotates, as in PEFT's OFT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.blocks = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(x)).unflatten(-1, (4, 16))
        return x + self.down(torch.einsum("...bi,bio->...bo", inner, self.blocks).flatten(-2))


def test_layers_around_a_block_diagonal_matrix_are_no_experts():
    layer_roles = roles(_Rotated(), tokens())
    assert {name: layer_roles[name] for name in ("up", "down")} == {"up": "ffn_in", "down": "ffn_out"}


def test_layers_with_unused_results_keep_their_roles():
    assert roles(Tower(), tokens()) == {**below("body.0"), **below("body.1")}


@pytest.mark.parametrize(("streams", "role"), [(True, "embedding"), (False, "conditioning")])
def test_layer_that_starts_a_stream_has_role_embedding_not_conditioning(streams: bool, role: str):
    assert roles(Meeting(streams), tokens(), tokens())["start"] == role


def test_every_input_of_a_recurrence_is_one():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            key, value, out = self.a
            k, v = torch.exp(key(x)), value(x)
            above, below_, steps = k[:, 0] * v[:, 0], k[:, 0], []
            for step in range(1, x.shape[1]):
                above, below_ = above + k[:, step] * v[:, step], below_ + k[:, step]
                steps.append(above / below_)
            return x + out(torch.stack([steps[0], *steps], 1))

    assert roles(Weighted(), tokens()) == {"a.0": "mixer_in", "a.1": "mixer_in", "a.2": "mixer_out"}


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


@pytest.mark.parametrize("eager", [False, True])
def test_queries_of_chosen_tokens_attend_however_that_is_spelled(eager: bool):
    layer_roles = roles(_Divided(eager), tokens())
    attention = {"q": "qkv", "k": "qkv", "v": "qkv", "out": "attn_out"}
    assert layer_roles == {**below("body"), "scores": "router", **attention}


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


@pytest.mark.parametrize("taps", [1, 3])
def test_a_convolution_behind_the_last_layer_is_how_the_model_ends(taps: int):
    layer_roles = roles(_Smoothed(False, taps), tokens())
    assert {**below("body"), "a": "head"}.items() <= layer_roles.items()


@pytest.mark.parametrize("taps", [1, 3])
def test_a_layer_behind_convolutions_is_the_head_instead(taps: int):
    layer_roles = roles(_Smoothed(True, taps), tokens())
    assert (layer_roles["a"], layer_roles["b"]) == ("embedding", "head")


class _Shifted(nn.Module):
    """Attention that takes the maximum off its scores by itself, as those with a sink do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, out = self.a
        scores = q(x) @ k(x).transpose(-1, -2)
        weights = torch.softmax(scores - scores.max(-1, keepdim=True).values, -1)
        return x + out(weights @ v(x))


def test_a_maximum_whose_place_nobody_reads_chooses_nothing():
    assert roles(_Shifted(), tokens()) == ATTENTION


class _Tied(nn.Module):
    """A body between a table and a head that is the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(11, WIDTH), Body()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids)) @ self.table.weight.t()


def _neighbours() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Models that have, together, every role and what is nearly it."""
    x, ids = tokens(), torch.arange(LENGTH)[None]
    yield from (
        (model, x) for model in (Attention(), Headed(False), Headed(True), Mixer("product"), Routed(True))
    )
    yield from ((model, x) for model in (SoftMixture(), Squeezed(True), Squeezed(False), Routed(False)))
    yield nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)), x
    yield StackedExperts(len(x), WIDTH), x
    yield _Tied(), ids
    yield nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, WIDTH), Body()), ids


def test_every_statement_is_true_of_some_layer_and_false_of_another(monkeypatch):
    evaluate, seen = Statement.evaluate, defaultdict(set)

    def recorded(statement, site):
        answer = evaluate(statement, site)
        assert answer.says
        seen[statement].add(answer.holds)
        return answer

    monkeypatch.setattr(Statement, "evaluate", recorded)
    for model, x in _neighbours():
        roles(model, x)
    assert seen == {statement: {True, False} for statement in STATEMENTS}
