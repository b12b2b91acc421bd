"""`explain` goes where compiling goes: past code that asks for the values of tensors."""

from __future__ import annotations

import pytest
import torch
from helpers.made import Made, calling
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import mxcompile
from mxcompile.errors import ModelError

WIDTH = 64


class Expert(
    Made,
    router=(WIDTH, 4),
    up=lambda: nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH)),
    down=lambda: nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH)),
):
    """Experts in a loop over those that were chosen, as Hugging Face's are in eager mode."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        mask = F.one_hot(chosen, self.up.shape[0]).permute(2, 1, 0)
        result = torch.zeros_like(x)
        for expert in (mask.sum((1, 2)) > 0).nonzero():
            position, token = torch.where(mask[expert[0]])
            hidden = F.silu(F.linear(x[token], self.up[expert[0]]))
            hidden = F.linear(hidden, self.down[expert[0]])
            result.index_add_(0, token, hidden * weights[token, position, None])
        return x + result


def test_loop_over_experts_is_counted_as_balanced_with_a_warning():
    model, tokens = nn.Sequential(Expert(), Expert()), 32
    report = mxcompile.explain(model, torch.randn(tokens, WIDTH), training=False)
    experts = [gemm for gemm in report.gemms if not gemm.name.endswith("router")]
    routed = 2 * tokens  # two experts a token
    assert sum(gemm.flops for gemm in experts) == 2 * 2 * (2 * routed * WIDTH * 2 * WIDTH)
    roles = {gemm.name: gemm.role for gemm in report.gemms}
    ends = {"router": "router", "up": "expert_in", "down": "expert_out"}
    assert roles == {f"{block}.{end}": role for block in (0, 1) for end, role in ends.items()}
    assert {gemm.reason for gemm in experts} == {"outside the compiled graphs"}  # Dynamo leaves the loop out
    assert any("topk of computed values" in warning for warning in report.summary.warnings)
    assert any("test_data_dependent.py" in warning for warning in report.summary.warnings)


class FeedForward(Made, up=(WIDTH, 2 * WIDTH), down=(2 * WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def named_experts() -> nn.Module:
    return nn.ModuleDict({f"expert_{i}": FeedForward() for i in range(4)})


class Named(Made, router=(WIDTH, 4), experts=named_experts):
    """Experts in a dictionary, taken by a name that is written with their number (Switch Transformers')."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.amax(-1), scores.argmax(-1)
        result = torch.zeros_like(x)
        for number in F.one_hot(chosen, len(self.experts)).sum(0).nonzero():
            token = torch.where(chosen == number[0])[0]
            result.index_add_(0, token, self.experts[f"expert_{number[0]}"](x[token]) * weights[token, None])
        return x + result


class Counted(Made, router=(WIDTH, 4), experts=lambda: nn.ModuleList(FeedForward() for _ in range(4))):
    """Experts in a list, each for as many rows as NumPy counts (HiDream's)."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        order = chosen.view(-1).argsort()
        ends = chosen.view(-1).bincount().cpu().numpy().cumsum(0)
        result = torch.zeros_like(x)
        for i, end in enumerate(ends):
            token = order[0 if i == 0 else ends[i - 1] : end]
            result[token] = self.experts[i](x[token]) * weights[token]
        return x + result


@pytest.mark.parametrize(("kind", "expert"), [(Named, "experts.expert_{}"), (Counted, "experts.{}")])
def test_python_reads_values_of_fakes_and_experts_compiled_alone_have_their_roles(kind, expert):
    report = mxcompile.explain(nn.Sequential(kind(), kind()), torch.randn(32, WIDTH), training=False)
    records = {gemm.name: (gemm.role, gemm.precision, gemm.m) for gemm in report.gemms}
    inside = {
        f"{block}.{expert.format(i)}.{name}": (role, "mxfp8", 32 // 4)
        for block in (0, 1)
        for i in range(4)
        for name, role in (("up", "expert_in"), ("down", "expert_out"))
    }
    assert records == {**inside, **{f"{block}.router": ("router", "bf16", 32) for block in (0, 1)}}


class Sliced(nn.Module):
    """Experts whose weights a submodule is given as plain tensors, cut from one stack (DBRX's)."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.inner = GivenWeights()
        self.up = nn.Parameter(torch.randn(num_experts * 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(num_experts * 2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1)
        result = torch.zeros_like(x)
        up, down = self.up.view(-1, 2 * WIDTH, WIDTH), self.down.view(-1, 2 * WIDTH, WIDTH)
        for number in F.one_hot(chosen.view(-1), len(up)).sum(0).nonzero():
            token = torch.where(chosen.view(-1) == number[0])[0]
            result.index_add_(0, token, self.inner(x[token], up[number[0]], down[number[0]]) * weights[token])
        return x + result


class GivenWeights(nn.Module):
    def forward(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.silu(x @ up.t()) @ down


def test_weights_that_reach_a_graph_as_plain_tensors_are_found_by_the_module_that_runs_them():
    report = mxcompile.explain(Sliced(), torch.randn(32, WIDTH), training=False)
    experts = [gemm for gemm in report.gemms if gemm.name != "router"]
    assert {(g.name, g.role) for g in experts} <= {
        ("inner", "expert_in"), ("inner", "expert_out"), ("up", "expert_in"), ("down", "expert_out"),
    }  # fmt: skip
    assert {g.role for g in experts} == {"expert_in", "expert_out"}
    assert {g.precision for g in experts} == {"bf16"}
    assert all("outside" in g.reason for g in experts)
    assert sum(g.flops for g in experts) == 2 * 2 * 32 * WIDTH * 2 * WIDTH


class Asks(Made, blocks=lambda: nn.ModuleList([Broken(), Broken()]), head=(WIDTH, 40)):
    """Code that fails where it is told that it is compiled, and runs where it is not."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones_like(x)
        x = x * mask[:, :]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_code_around_breaks_is_planned_as_the_eager_code_it_is():
    report = mxcompile.explain(Asks(), torch.randn(32, WIDTH), training=False)
    roles = {gemm.name: gemm.role for gemm in report.gemms}
    ends = {"up": "ffn_in", "down": "ffn_out"}
    inside = {f"blocks.{i}.{end}": role for i in (0, 1) for end, role in ends.items()}
    assert roles == {"head": "head", **inside}


class Cropped(Made, layers=lambda: nn.ModuleList(Broken() for _ in range(3))):
    """Layers of equal code with a break in each, behind a size that an input decides."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : int(lengths.max().item())]
        for layer in self.layers:
            x = layer(x)
        return x


class Broken(Made, up=(WIDTH, WIDTH), down=(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(hidden))


def test_values_of_inputs_decide_sizes_and_shared_code_counts_for_every_layer():
    lengths = torch.tensor([7, 12])
    report = mxcompile.explain(Cropped(), torch.randn(2, 20, WIDTH), lengths)
    sizes = {(gemm.name, gemm.m) for gemm in report.gemms if gemm.gemm == "fprop"}
    assert sizes == {(f"layers.{i}.{name}", 2 * 12) for i in range(3) for name in ("up", "down")}
    assert report.summary.warnings == ()
    assert lengths.tolist() == [7, 12]


def test_computed_masks_are_assumed_true_with_a_warning():
    score, head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
    model = calling(lambda self, x: self.head(x[self.score(x)[:, 0] > 0]), score=score, head=head)
    report = mxcompile.explain(model, torch.randn(48, WIDTH), training=False)
    (head,) = [gemm for gemm in report.gemms if gemm.name == "head"]
    assert head.m == 48
    assert any(warning.startswith("assumed: ") for warning in report.summary.warnings)


def test_products_outside_of_graphs_are_counted():
    model = calling(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(WIDTH, WIDTH))
    report = mxcompile.explain(model, torch.randn(5, 2, WIDTH), training=False)
    assert {gemm.reason for gemm in report.gemms} == {"outside the compiled graphs"}
    assert sum(gemm.flops for gemm in report.gemms) == 2 * (5 * 2) * (4 * WIDTH) * WIDTH * 2
    assert {gemm.name for gemm in report.gemms} == {"lstm"}


class Raises(Made, fc=(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.fc(x.reshape(-1, 7))


def test_a_failure_names_layer_and_line():
    with pytest.raises(ModelError, match=r"test_data_dependent\.py:\d+\)") as caught:
        mxcompile.explain(calling(lambda self, x: self.inner(x), inner=Raises()), torch.randn(4, WIDTH))
    assert "in inner" in str(caught.value)
    assert "RuntimeError: shape '[-1, 7]' is invalid for input of size 256" in str(caught.value)
    assert "pass inputs with values" not in str(caught.value)  # which would not help


class Language(nn.Module):
    """A language model whose code breaks between its body and its head, whose rows are the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(50, WIDTH), FeedForward()
        self.head = calling(lambda self, x: F.linear(x, self.rows), rows=self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.body(x)
        torch._dynamo.graph_break()
        return self.head(x)


def test_a_shared_table_behind_a_break_is_called_by_the_module_that_runs_it():
    report = mxcompile.explain(Language(), torch.arange(8).view(2, 4), training=False)
    assert report.summary.graphs == 2
    assert {g.name: g.role for g in report.gemms}.items() >= {("head.rows", "head")}


@torch.compiler.disable
def same(module: nn.Module) -> nn.Module:
    return module


class Kept(Made, scores=(WIDTH, 3)):
    """Sets its layer anew in every call, to what code that is not compiled gives, as Switch's router does."""

    def forward(self, x: Tensor) -> Tensor:
        self.scores = same(self.scores)
        return self.scores(x)


def test_a_layer_that_dynamo_keeps_on_its_stack_over_a_break_has_its_own_name():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Kept())
    report = mxcompile.explain(model, torch.randn(4, WIDTH), training=False)
    assert {gemm.name for gemm in report.gemms} == {"0", "1.scores"}


class Cut(Made, up=(WIDTH, 64), down=(64, WIDTH)):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("needed", [False, True])
def test_products_outside_of_graphs_have_the_gradients_that_the_call_needs(needed: bool):
    model, x = Cut(), torch.randn(4, WIDTH, requires_grad=needed)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    report = mxcompile.explain(model, x)
    assert sum(gemm.flops for gemm in report.gemms) == counter.get_total_flops()
