"""Audits of models that are not one plain training graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import models
from helpers.blocks import WIDTH, SwiGLU, features
from helpers.made import Made
from helpers.reports import EVERYTHING
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mxcompile import explain
from mxcompile.analysis.audit import Audit, audit
from mxcompile.errors import ModelError, PolicyError


class Loss(Made):
    """The mean square of what `inner` returns."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().square().mean()


def in_mxfp8(result: Audit) -> Counter[tuple[str, str]]:
    return Counter((g.name, g.gemm) for g in result.report.gemms if g.precision == "mxfp8")


def measured(result: Audit) -> Counter[tuple[str, str]]:
    return Counter((g.name, g.gemm) for g in result.numerics.gemms)


@pytest.mark.parametrize("architecture", [models.mixtral, models.t5, models.fused, models.torch_encoder])
def test_every_mxfp8_gemm_of_the_report_is_measured(architecture: Any) -> None:
    case = architecture(1)
    result = audit(case.model, loss_fn=case.loss, **case.kwargs)
    assert measured(result) == in_mxfp8(result)
    assert len(in_mxfp8(result)) >= 6
    assert all(20 < gemm.sqnr_db < 50 for gemm in result.numerics.gemms)
    assert all(25 < tensor.sqnr_db < 60 for tensor in result.numerics.tensors)
    assert abs(result.numerics.loss_gap or 1) < 0.05


class Broken(Made, first=SwiGLU, second=SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_audit_with_graph_break_measures_both_graphs() -> None:
    result = audit(Loss(inner=Broken()), features(2, 9, WIDTH), policy=EVERYTHING)
    assert result.report.summary.graphs >= 2
    assert len({gemm.graph for gemm in result.report.gemms}) == 2
    assert measured(result) == in_mxfp8(result)
    assert {name.rpartition(".")[0] for name, _ in measured(result)} == {"inner.first", "inner.second"}


class Remembering(Made, first=(WIDTH, 64), second=(64, WIDTH), seen=list):
    """Its list, which every run grows, makes Dynamo compile the first of two frames again."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_model_compiled_again_in_each_run_has_each_gemm_once() -> None:
    model, x = Loss(inner=Remembering()), features(40, WIDTH)
    policy = {
        "version": 1,
        "rules": [
            {"match": {"name": "*first"}, "use": "mxfp8"},
            {"match": {"name": "*second"}, "use": "bf16"},
        ],
    }
    expected = explain(model, x, policy=policy)
    result = audit(model, x, policy=policy)
    assert len(model.inner.seen) > 1
    assert Counter((g.name, g.gemm) for g in result.report.gemms) == Counter(
        (g.name, g.gemm) for g in expected.gemms
    )
    for figure in ("num_gemms", "flop_share", "casts", "weight_bytes", "graphs"):
        assert getattr(result.report.summary, figure) == getattr(expected.summary, figure), figure
    assert measured(result) == in_mxfp8(result)


def test_symbolic_shapes_are_measured_at_their_value() -> None:
    x = features(21, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    result = audit(Loss(inner=SwiGLU()), x, policy=EVERYTHING)
    still = audit(Loss(inner=SwiGLU()), features(21, WIDTH), policy=EVERYTHING)
    assert {g.m for g in result.numerics.gemms if g.gemm == "fprop"} == {21}
    assert measured(result) == measured(still)
    assert [t.numel for t in result.numerics.tensors] == [t.numel for t in still.numerics.tensors]


@pytest.mark.parametrize(
    ("saved", "weight_block"), [("transcode", "1x32"), ("bf16", "1x32"), ("columnwise", "32x32")]
)
def test_wgrad_is_audited_against_the_source_for_every_saved_form(saved: str, weight_block: str) -> None:
    use = {"precision": "mxfp8", "saved": saved, "weight_block": weight_block}
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}
    result = audit(Loss(inner=SwiGLU()), features(70, WIDTH).requires_grad_(), policy=policy)
    assert len(measured(result)) == 9
    assert all(26 < g.sqnr_db < 31 for g in result.numerics.gemms)
    squares = {t.operand for t in result.numerics.tensors if t.block == "32x32"}
    assert squares == ({"w"} if weight_block == "32x32" else set())


class Checkpointed(Made, inner=SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


def test_checkpointing_runs_forward_twice() -> None:
    result = audit(Checkpointed(), features(9, WIDTH).requires_grad_(), policy=EVERYTHING)
    assert measured(result) == in_mxfp8(result)
    calls = {(g.name, g.gemm): g.calls for g in result.numerics.gemms}
    assert (calls["inner.a", "fprop"], calls["inner.a", "wgrad"]) == (2, 1)


def test_autocast_quantizes_the_master_weight() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = audit(Loss(inner=SwiGLU()), features(40, WIDTH), policy=EVERYTHING)
    assert measured(result) == in_mxfp8(result)
    assert all(26 < g.sqnr_db < 31 for g in result.numerics.gemms)


def test_audit_without_tokens_is_exact() -> None:
    result = audit(SwiGLU(), features(0, WIDTH), policy=EVERYTHING, loss_fn=torch.sum)
    assert measured(result) == in_mxfp8(result)
    assert {g.m for g in result.numerics.gemms if g.gemm == "fprop"} == {0}
    assert all(g.sqnr_db == float("inf") for g in result.numerics.gemms)  # of nothing, or of zeros
    assert "exact" in str(result)


class Uncaptured(Made, inner=(WIDTH, WIDTH)):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def test_a_model_that_is_not_captured() -> None:
    result = audit(Uncaptured(), features(40, WIDTH), policy=EVERYTHING).numerics
    assert result.notes == (
        "no matrix product was captured: no graph that torch.compile traced of this model has one",
    )
    assert result.loss_gap == 0.0


def test_shared_casts_are_measured_once_with_all_their_readers() -> None:
    result = audit(Loss(inner=SwiGLU()), features(40, WIDTH), policy=EVERYTHING)
    (shared,) = (
        t for t in result.numerics.tensors if t.operand == "x" and t.shared_with and "fprop" in t.gemms
    )
    assert {shared.name, *shared.shared_with} == {"inner.a", "inner.b"}


@pytest.mark.parametrize("how", ["no_grad", "frozen", "no loss"])
def test_audit_without_gradients_measures_fprop_and_notes_the_reason(how: str) -> None:
    model, x = Loss(inner=SwiGLU()), features(40, WIDTH)
    if how == "frozen":
        model.requires_grad_(False)
    with torch.set_grad_enabled(how != "no_grad"):
        result = audit(model.inner if how == "no loss" else model, x, policy=EVERYTHING)
    assert {g.gemm for g in result.numerics.gemms} == {"fprop"}
    assert not result.numerics.gradients
    (note,) = result.numerics.notes
    expected = "returned no loss" if how == "no loss" else "the loss requires no gradient"
    assert note.startswith("gradients were not audited")
    assert expected in note
    assert (result.numerics.loss is None) == (how == "no loss")
    assert (result.numerics.logits_sqnr_db is None) == (how != "no loss")


def test_a_policy_that_quantizes_nothing() -> None:
    result = audit(Loss(inner=SwiGLU()), features(40, WIDTH), policy="bf16").numerics
    assert (result.gemms, result.tensors, result.loss_gap) == ((), (), 0.0)
    assert result.notes == ("preset bf16 quantizes no GEMM of this model",)


def test_a_rule_that_matched_nothing_is_noted() -> None:
    policy = {"version": 1, "rules": [{"match": {"name": "inner.x"}, "use": "mxfp8"}, EVERYTHING["rules"][0]]}
    (note,) = audit(Loss(inner=SwiGLU()), features(40, WIDTH), policy=policy).numerics.notes
    assert note.startswith("policy: rule 1 matched no layer: 'inner.x' (did you mean 'inner.")


@pytest.mark.parametrize("attribute", ["_compiled_call_impl", "forward"])
def test_a_model_compiled_in_place(attribute: str) -> None:
    model = Loss(inner=SwiGLU())
    if attribute == "forward":
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    else:
        model.compile(backend="eager")
    model(features(40, WIDTH))
    before = vars(model)[attribute]
    result = audit(model, features(40, WIDTH), policy=EVERYTHING)
    assert measured(result) == in_mxfp8(result)
    assert len(measured(result)) == 7  # no dgrad for the input, which needs no gradient
    assert vars(model)[attribute] is before


def test_user_mistakes_raise_model_or_policy_errors() -> None:
    x = features(40, WIDTH)
    with pytest.raises(ModelError, match=r"audit takes a torch\.nn\.Module, found function"):
        audit(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"\Acannot run the model .*: RuntimeError: .*\Z"):  # one line
        audit(Loss(inner=SwiGLU()), features(40, WIDTH + 1))
    with pytest.raises(
        ModelError, match=r"loss_fn must return a scalar .* found a tensor of shape \(40, 64\)"
    ):
        audit(SwiGLU(), x, loss_fn=lambda output: output)
    with pytest.raises(PolicyError):
        audit(Loss(inner=SwiGLU()), x, policy="nvidai")


@pytest.mark.parametrize("model_on", ["meta", "cpu"])
@pytest.mark.parametrize("input_on", ["meta", "cpu"])
def test_model_or_input_without_values_raises_and_names_explain(model_on: str, input_on: str) -> None:
    if model_on == input_on == "cpu":
        return
    model, x = Loss(inner=SwiGLU()).to(model_on), features(40, WIDTH).to(input_on)
    with pytest.raises(ModelError, match=r"\Acannot run the model.* on the meta device.* use explain.*\Z"):
        audit(model, x, loss_fn=lambda loss: loss * loss.item())
