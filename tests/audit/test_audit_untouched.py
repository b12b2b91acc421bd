"""An audit leaves no trace: the model, its gradients and the generators are bit for bit what they were."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import models
from helpers.blocks import WIDTH, SwiGLU, features
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.paces import mostly_slow
from helpers.reference import sqnr_db
from helpers.reports import EVERYTHING
from torch import Tensor, nn

import mxcompile
from mxcompile.analysis.audit import audit
from mxcompile.analysis.study.interpreter import Run
from mxcompile.analysis.study.session import Session
from mxcompile.analysis.study.state_guard import Generators, SavedState, drawing


class Busy(nn.Module):
    """Changes all it can: statistics, a counter, an attribute, its own weight, its input, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(40, 48), nn.Linear(48, 8), nn.BatchNorm1d(48)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.last: Tensor | None = None
        self.scale: nn.Module | None = None
        self.calls = 0

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        with torch.no_grad():
            self.a.weight.mul_(0.5)
            state += 1
        hidden = self.drop(self.norm(self.a(x)))
        self.last = hidden.detach()
        if self.scale is None:
            self.scale = nn.BatchNorm1d(48)
        return self.b(hidden * state.mean()).square().mean()


def bits(model: nn.Module) -> dict[str, Tensor]:
    state = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
    return {name: value.clone() for name, value in state.items() if value is not None}


def test_nothing_a_model_changes_stays_changed() -> None:
    model, x, state = Busy(), torch.randn(16, 40), torch.zeros(3)
    model(x, state).backward()  # gradients and statistics to lose
    del model.scale
    model.scale = None
    before, last, gradient = bits(model), model.last, model.a.weight.grad
    assert any(name.endswith(".grad") for name in before)
    generators, state_before = (torch.get_rng_state(), random.getstate()), state.clone()
    result = audit(model, x, state, policy=EVERYTHING)
    assert result.numerics.gradients
    assert {gemm.gemm for gemm in result.numerics.gemms} >= {"fprop", "wgrad"}
    after = bits(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert model.last is last
    assert model.scale is None
    assert list(model._modules) == ["a", "b", "norm", "drop"]
    assert model.a.weight.grad is gradient
    assert model.calls == 1
    assert torch.equal(state, state_before)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), np.random.rand, random.random])
def test_numbers_that_a_run_draws_are_drawn_again_after_it(draw: Callable[[], float]) -> None:
    before, drawn = Generators(), []
    assert not before.moved()
    for seed in (None, 7, 7):
        with drawing(seed):
            drawn.append(draw())
            assert before.moved()
        assert not before.moved()
    assert drawn[1] == drawn[2] != drawn[0] == draw()


class Noisy(Made, up=(40, 48), down=(48, 40)):
    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x)) * float(np.random.rand())).square().mean()


def test_both_runs_of_an_audit_draw_the_same_numbers_of_numpy() -> None:
    state = np.random.get_state()[1].copy()
    result = audit(Noisy(), torch.randn(16, 40), policy=EVERYTHING)
    assert abs(result.numerics.loss_gap or 1) < 0.1
    assert np.array_equal(np.random.get_state()[1], state)


SPARSE = {
    "coo": lambda: torch.eye(16).to_sparse(),
    "csr": lambda: torch.eye(16).to_sparse_csr(),
    "bsc": lambda: torch.eye(16).to_sparse_bsc((4, 4)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_buffer_written_to_is_restored(layout: str) -> None:
    model = Made(graph=nn.Buffer(SPARSE[layout]()))
    graph, saved = model.graph, SavedState(model)
    graph.mul_(2)
    if layout == "coo":
        graph.add_(torch.ones(16, 16).to_sparse())
    saved.restore()
    assert model.graph is graph
    assert torch.equal(graph.to_dense(), torch.eye(16))
    assert layout != "coo" or graph.is_coalesced()


class Dropped(Made, fc=(40, 48)):
    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.fc(x), 0.5)
        return torch.sparse.mm(self.graph, hidden).square().mean()


def test_model_with_a_sparse_buffer_is_audited_and_generators_restored() -> None:
    model, x = Dropped(graph=nn.Buffer(SPARSE["coo"]())), torch.randn(16, 40)
    before = torch.get_rng_state()
    result = audit(model, x, policy=EVERYTHING)
    assert result.numerics.loss is not None
    assert torch.equal(torch.get_rng_state(), before)


class Resizing(Made, fc=(40, 48)):
    def forward(self, x: Tensor) -> Tensor:
        self.memory.resize_(8).fill_(1.0)
        return self.fc(x).square().mean() * self.memory.sum()


def test_buffer_that_a_run_resizes_has_its_size_and_values_again() -> None:
    memory = torch.arange(4.0)
    view = memory[1:]
    model = Resizing(memory=nn.Buffer(memory))
    memory = model.memory
    audit(model, torch.randn(16, 40), policy=EVERYTHING)
    assert model.memory is memory
    assert memory.tolist() == [0, 1, 2, 3]
    view[0] = 9
    assert memory.tolist() == [0, 9, 2, 3]


def train(model: nn.Module, kwargs: dict[str, Any], audited: bool) -> list[Tensor]:
    """Losses and gradients of two compiled steps, with an audit between them or not."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    compiled = torch.compile(model, backend="aot_eager")
    seen = []
    for _ in range(2):
        loss = compiled(**kwargs).loss
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if audited:
            audit(compiled, **kwargs)
    return seen


@pytest.mark.slow
def test_training_goes_on_as_without_the_audit() -> None:
    runs = []
    for audited in (False, True):
        torch.manual_seed(1)
        case = models.llama(1, attention_dropout=0.2)
        runs.append(train(case.model, case.kwargs, audited))
    assert len(runs[0]) > 10
    assert all(torch.equal(tensor, other) for tensor, other in zip(*runs, strict=True))


@pytest.mark.parametrize("architecture", mostly_slow([models.llama, models.mixtral], models.llama))
def test_observers_leave_outputs_and_gradients_unchanged(architecture: Any) -> None:
    """Outputs and gradients are those of the same graphs run by torch alone."""
    case = architecture(1)
    gradients: dict[str, Tensor] = {}
    for name, parameter in case.model.named_parameters():
        parameter.register_hook(lambda grad, name=name: gradients.update({name: grad.clone()}))
    session = Session(case.model, (), case.kwargs, policy="ocp", loss_fn=case.loss)
    runs = {
        "bf16": Run(quantized=lambda _: False),
        "ocp": Run(quantized=lambda _: True),
        "ocp, observed": Run(quantized=lambda _: True, observe=True),
    }
    seen = {}
    for label, run in runs.items():
        gradients.clear()
        seen[label] = session.run(run, backward=True).logits, dict(gradients)
    for policy in ("bf16", "ocp"):
        gradients.clear()
        torch._dynamo.reset()
        output = torch.compile(case.model, backend=EagerBackend(policy=policy))(**case.kwargs)
        case.loss(output).backward()
        for label in (label for label in runs if label.startswith(policy)):
            logits, gradients_seen = seen[label]
            assert logits is not None
            assert torch.equal(case.logits(output), logits), label
            assert gradients_seen.keys() == gradients.keys()
            assert all(torch.equal(gradients[name], grad) for name, grad in gradients_seen.items()), label
    assert not torch.equal(seen["ocp"][0], seen["bf16"][0])
    assert len(runs["ocp, observed"].products) == len(session.sites.products)


def test_audited_output_equals_compiled_output_within_rounding() -> None:
    """To the rounding of fused operators and the order of sums: far above what the casts cost."""
    model, x = SwiGLU(), features(40, WIDTH)
    with torch.no_grad():
        session = Session(model, (x,), {}, policy=EVERYTHING)
        audited = session.run(Run(quantized=lambda _: True)).logits
        plain = session.run(Run(quantized=lambda _: False)).logits
        compiled = torch.compile(model, backend="mxfp8", options={"policy": EVERYTHING})(x)
    assert audited is not None
    assert plain is not None
    assert sqnr_db(compiled, audited) > 45
    assert sqnr_db(plain, audited) < 32


def test_the_model_is_not_kept_alive() -> None:
    model, x = Busy(), torch.randn(16, 40)
    audit(model, x, torch.zeros(3), policy=EVERYTHING)
    alive = weakref.ref(model), weakref.ref(x)
    del model, x
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_no_report_is_left_behind() -> None:
    audit(Busy(), torch.randn(16, 40), torch.zeros(3), policy=EVERYTHING)
    assert mxcompile.reports() == []
