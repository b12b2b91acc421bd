"""Tuning finds what breaks a bound, that only, and writes why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from recorded_bars import recorded_bars
from torch import Tensor, nn

from mxcompile.analysis.audit import audit
from mxcompile.analysis.study.mixes import BF16, Candidate, Mix, Mixes, Option
from mxcompile.analysis.tune import Tuned, tune
from mxcompile.cli import main
from mxcompile.errors import ModelError, OptionError
from mxcompile.policy import Layer, Policy, Role
from mxcompile.policy.model import Block

FLOOR: dict[str, Any] = {
    "version": 1,
    "rules": [{"match": {"name": "*"}, "use": {"precision": "mxfp8", "rounding": "floor"}}],
}


def planted(path: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A small Llama in which a few input channels of one layer have weights a thousand times too large."""
    torch.manual_seed(seed)
    case = models.llama(1, hidden_size=96, intermediate_size=160)
    with torch.no_grad():
        case.model.get_submodule(path).weight[:, [3, 17, 40]] *= 1000
    ids = torch.randint(0, 128, (4, 64))
    return case.model, {"input_ids": ids, "labels": ids, "use_cache": False}


def test_a_planted_outlier_layer_is_found_and_nothing_else(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.v_proj"
    model, kwargs = planted(name, seed=8)
    before = audit(model, policy="ocp", **kwargs)
    failing = [(g.name, g.gemm) for g in before.numerics.gemms if g.sqnr_db < 25]
    assert {layer for layer, _ in failing} == {name}

    result = tune(model, policy="ocp", min_sqnr=25, **kwargs)
    assert result.met
    assert in_bf16(result) == failing
    kept = {(g.name, g.gemm) for g in result.audit.report.gemms if g.precision == "mxfp8"}
    assert kept == {(g.name, g.gemm) for g in before.report.gemms if g.precision == "mxfp8"} - set(failing)
    assert min(g.sqnr_db for g in result.audit.numerics.gemms) >= 25

    result.dump(tmp_path / "policy.yaml")
    with pytest.raises(OptionError, match="cannot be written"):
        result.dump(tmp_path)
    text = (tmp_path / "policy.yaml").read_text()
    assert Policy.load(tmp_path / "policy.yaml") == result.policy
    lines = text.splitlines()
    (rule,) = (i for i, line in enumerate(lines) if line.endswith(f"name: {name}"))
    comment = next(line for line in reversed(lines[:rule]) if line.strip().startswith("#"))
    measured = re.search(
        r"preset ocp: 1 layer, lowest SQNR (\S+) dB. \S+: dgrad (\S+) dB in preset ocp$", comment
    )
    assert measured is not None
    assert float(measured[1]) >= 25 > float(measured[2])
    assert "kept quantized: " in text


def in_bf16(tuned: Tuned) -> list[tuple[str, str]]:
    return [(chosen.name, gemm) for chosen in tuned.chosen for gemm in chosen.kept]


class Sum(nn.Module):
    """Layers side by side; the loss is the distance of their sum to what it is in FP32, and a constant."""

    def __init__(self, outlier: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 48, bias=False) for _ in range(4))
        with torch.no_grad():
            self.branches[outlier].weight[:, [5, 40]] *= 1000

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (sum(branch(x) for branch in self.branches) - target).square().mean() + 1  # type: ignore[no-any-return]


def side_by_side(outlier: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model, x = Sum(outlier), torch.randn(100, 64)
    with torch.no_grad():
        return model, (x, sum(branch(x) for branch in model.branches))  # type: ignore[return-value]


def test_a_bound_on_the_loss_exempts_the_layer_that_moves_it() -> None:
    model, args = side_by_side(2)
    alone = {}  # what each layer does to the loss, each under a policy of its own
    for index in range(4):
        policy = {**FLOOR, "rules": [{**FLOOR["rules"][0], "match": {"name": f"branches.{index}"}}]}
        policy["rules"].append({"match": {"name": "*"}, "use": "bf16"})
        alone[index] = audit(model, *args, policy=policy).numerics.loss_gap
    assert alone[2] > 100 * max(alone[i] for i in (0, 1, 3))

    result = tune(model, *args, policy=FLOOR, max_loss_gap=0.01)
    assert result.met
    assert in_bf16(result) == [("branches.2", "fprop")]
    assert result.chosen[0].reason == f"policy alone moves the loss by {alone[2]:+.4%}"
    assert abs(result.audit.numerics.loss_gap or 1) <= 0.01
    assert result.flop_share_before == 1.0
    assert result.audit.report.summary.flop_share == pytest.approx(
        7 / 8
    )  # of four forward and four weight GEMMs
    formats = {g.formats for g in result.audit.report.gemms if g.name == "branches.2" and g.gemm == "wgrad"}
    assert {form.rounding for group in formats for form in group} == {"floor"}  # as the rule it stands before
    assert "bound: loss within 0.01 of BF16 (1.0000%): fulfilled" in str(result)


def test_no_exception_where_none_is_needed() -> None:
    model, args = side_by_side(2)
    result = tune(
        model, *args, policy={**FLOOR, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}, min_sqnr=10
    )
    assert result.met
    assert (result.chosen, len(result.policy.rules)) == ((), 1)


def test_a_bound_that_nothing_meets() -> None:
    model, args = side_by_side(2)
    result = tune(model, *args, policy=FLOOR, min_sqnr=200)
    assert not result.met
    assert "CANNOT BE FULFILLED" in str(result)
    assert "nothing is left quantized" in str(result)
    assert [(choice.name, choice.use) for choice in result.chosen] == [
        (f"branches.{i}", "bf16") for i in range(4)
    ]
    assert all("use: bf16" in str(rule) or rule["use"] == "bf16" for rule in result.policy.to_dict()["rules"])


def test_rules_that_no_longer_decide_are_left_out() -> None:
    model, args = side_by_side(2)
    policy = {
        **FLOOR,
        "rules": [{"match": {"name": "branches.2"}, "use": {**FLOOR["rules"][0]["use"]}}, *FLOOR["rules"]],
    }
    result = tune(model, *args, policy=policy, max_loss_gap=0.01)
    assert [rule.match.name for rule in result.policy.rules] == [("branches.2",), ("*",)]
    assert Policy.from_dict(result.policy.to_dict()) == result.policy


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({}, "tune needs a bound"),
        ({"min_sqnr": float("nan")}, "`min_sqnr` must be a finite number of dB, found nan"),
        ({"max_loss_gap": 0.0}, "`max_loss_gap` must be a positive share"),
    ],
)
def test_tune_with_invalid_bound_raises(bounds: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tune(nn.Linear(3, 3), torch.randn(2, 3), **bounds)  # type: ignore[arg-type]


def test_a_loss_bound_needs_a_loss() -> None:
    with pytest.raises(ModelError, match="`max_loss_gap` needs a loss"):
        tune(nn.Linear(40, 40), torch.randn(2, 40), policy=FLOOR, max_loss_gap=0.01)


def test_tune_rejects_nonfinite_results_under_every_bound() -> None:
    model, args = side_by_side(2)
    with torch.no_grad():
        model.branches[1].weight[3, 3] = float("nan")  # type: ignore[index, union-attr]
    result = tune(model, *args, policy=FLOOR, max_loss_gap=0.01)
    assert not result.met
    result = tune(model, *args, policy=FLOOR, min_sqnr=10)
    reasons = {choice.name: choice.reason for choice in result.chosen}
    assert [name for name, reason in reasons.items() if "fprop" in reason] == ["branches.1"]
    assert "fprop NaN dB in policy" in reasons["branches.1"]


def kept_in_bf16(policy: Policy, layer: Layer, gemms: tuple[str, ...]) -> Policy:
    mix: Mix = {layer.name: Option(candidate=0, kept=gemms) if len(gemms) < 3 else BF16}
    candidates = [Candidate.start(policy)]
    return Mixes(start=policy, layers={layer.name: layer}, candidates=candidates, label="").policy(mix)


def layer(name: str, block: Block | None = None) -> Layer:
    return Layer(name=name, role=Role.FFN_IN, module="Linear", m=64, n=64, k=64, block=block)


def test_names_with_pattern_signs_match_themselves_only() -> None:
    policy = kept_in_bf16(Policy(), layer("h[0].*"), ("fprop", "dgrad", "wgrad"))
    (rule,) = policy.rules
    assert rule.match.name == ("h[[]0].[*]",)
    assert [rule.match.names(name) for name in ("h[0].*", "h0.a", "h[0].a")] == [True, False, False]
    assert Policy.from_dict(policy.to_dict()) == policy


def test_gemms_not_kept_in_bf16_follow_the_rule_of_their_blocks() -> None:
    use = {"precision": "mxfp8", "rounding": "floor"}
    policy = Policy.from_dict({"version": 1, "rules": [{"match": {"blocks": {"first": 1}}, "use": use}]})
    rule, *_ = kept_in_bf16(policy, layer("h.0.up", Block(0, 4)), ("dgrad",)).rules
    assert (str(rule.use.fprop), str(rule.use.dgrad), rule.use.rounding) == ("mxfp8", "bf16", "floor")


def example() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, object]]:
    model, args = side_by_side(2)
    return model, args, {}


def test_tune_command_writes_a_valid_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, start = tmp_path / "tuned.yaml", tmp_path / "start.yaml"
    start.write_text("version: 1\nrules:\n- match: {name: '*'}\n  use: {precision: mxfp8, rounding: floor}\n")
    command = ["tune", f"{__name__}:example", "--policy", str(start)]
    assert main([*command, "--max-loss-gap", "1%", "-o", str(out)]) == 0
    assert "branches.2" in capsys.readouterr().out
    assert [rule.match.name for rule in Policy.load(out).rules] == [("branches.2",), ("*",)]
    assert main(["policy", "check", str(out)]) == 0
    capsys.readouterr()
    assert main([*command, "--min-sqnr", "200", "-o", str(tmp_path / "none.yaml")]) == 1
    assert "CANNOT BE FULFILLED" in capsys.readouterr().out
    assert not (tmp_path / "none.yaml").exists()
    assert main(command) == 2
    assert "tune needs a bound" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--max-loss-gap", "much"])
    assert "is not a share, such as 0.002" in capsys.readouterr().err


def test_progress_bar_of_tune_describes_each_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = recorded_bars(monkeypatch, "mxcompile.analysis.tune.search")
    model, inputs, _ = example()
    tune(model, *inputs, policy=FLOOR, min_sqnr=200.0)
    (bar,) = bars
    assert list(dict.fromkeys(bar.descriptions)) == [
        "tune: tracing",
        "tune: everything in policy: ",
        "tune: the rest in policy: ",
        "tune: audit of the policy: ",
    ]
    tune(model, *inputs, policy=FLOOR, max_loss_gap=0.01)
    (_, bar) = bars
    alone = [words for words in bar.descriptions if words.endswith("alone: ")]
    assert alone == [f"tune: the loss with branches.{branch} alone: " for branch in range(4)]
