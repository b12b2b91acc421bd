"""Blame names what was planted, in as many runs as it announced, and its policy takes the difference away."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING as ALL
from torch import Tensor, nn

from mxcompile.analysis.audit import audit
from mxcompile.analysis.blame import Blamed, Spread, blame
from mxcompile.analysis.blame.blamed import exceeds, falls_short, together
from mxcompile.analysis.blame.search import LEAST, RunPlan
from mxcompile.analysis.study.session import Session
from mxcompile.cli import main
from mxcompile.errors import ModelError, OptionError
from mxcompile.policy import Policy


class Branches(nn.Module):
    """Five layers side by side. One has a few weights so large that the others of a block become 0.

    Its inputs are as small there, so that what is lost is as much of the result as in the other layers.
    """

    def __init__(self, culprit: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.front = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("size", torch.ones(64))
        with torch.no_grad():
            self.layers[culprit].weight[:, [3, 40]] *= 1e6
            self.size[[3, 40]] = 1e-6

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.dropout(torch.tanh(self.front(x))) * self.size
        return (sum(layer(x) for layer in self.layers) - target).square().mean()


def branches(**settings: Any) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Branches(**settings), (torch.randn(64, 64), torch.randn(64, 64))


NAMES = ["front", *(f"layers.{index}" for index in range(5))]


@pytest.fixture(scope="module")
def blamed() -> Blamed:
    model, args = branches()
    return blame(model, *args, policy=ALL, kwargs=None)


def gradient_effect(model: nn.Module, args: Any, policy: Policy) -> float:
    """As the module of effects says, from an audit."""
    measured = [
        parameter for parameter in audit(model, *args, policy=policy).numerics.parameters if parameter.flops
    ]
    return math.sqrt(
        sum(parameter.harm for parameter in measured) / sum(parameter.flops for parameter in measured)
    )


def test_the_layer_that_was_planted_comes_first(blamed: Blamed) -> None:
    assert blamed.measure == "gradients"
    assert (blamed.num_layers, blamed.num_gemms) == (6, 17)  # the first layer's input needs no gradient
    assert blamed.parts[0].layers == ("layers.3",)
    assert sorted(part.layers for part in blamed.parts) == [(name,) for name in NAMES]
    first, second = (part.alone.on("gradients").size for part in blamed.parts[:2])
    assert first > 3 * second
    assert {layer for layer, _ in blamed.worst} == {"layers.3"}
    assert [kind.gemms for kind in blamed.kinds] == [("fprop",), ("dgrad",), ("wgrad",)]
    assert blamed.repeats == 1
    assert blamed.whole.on("gradients").error is None


def test_the_policy_is_read_back_and_takes_the_difference_away(blamed: Blamed, tmp_path: Path) -> None:
    blamed.dump(tmp_path / "policy.yaml")
    policy = Policy.load(tmp_path / "policy.yaml")
    assert policy == blamed.policy
    model, args = branches()
    assert gradient_effect(model, args, Policy.resolve(ALL)) == blamed.whole.on("gradients").mean
    remaining = gradient_effect(model, args, policy)
    assert remaining == blamed.left.on("gradients").mean
    assert remaining <= blamed.whole.on("gradients").mean / 2
    assert blamed.flop_share < blamed.flop_share_before == 1
    assert audit(model, *args, policy=policy).report.summary.flop_share == pytest.approx(blamed.flop_share)
    with pytest.raises(OptionError, match="cannot be written"):
        blamed.dump(tmp_path)


def test_blame_text_has_heading_and_rows_of_layers(blamed: Blamed) -> None:
    text = str(blamed)
    assert max(map(len, text.splitlines())) <= 120
    effect = "effect of policy against preset bf16 on the gradients"
    assert text.startswith(f"blame: {effect}: 6 layers, 17 GEMMs; {blamed.runs} runs")
    rows = [line.split() for line in text.splitlines()]
    start = next(index for index, row in enumerate(rows) if row[:3] == ["layer", "GEMMs", "of"]) + 2
    assert [row[0] for row in rows[start : start + 5]] == ["(all)"] * 4 + ["layers.3"]
    assert "layers.3: " in blamed.to_yaml()
    assert blamed.to_yaml().startswith("# blame: effect of policy against preset bf16")


class Weighted(Made, front=(64, 64, False), a=(64, 64, False), b=(64, 64, False)):
    """Some tokens of `z` are a million times larger and count little in the loss: wgrad mixes tokens."""

    def forward(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return (weight * (self.a(x + torch.tanh(self.front(x))) + self.b(z)).square()).mean()


def weighted() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    z, weight = torch.randn(64, 64), torch.ones(64, 1)
    z[::32] *= 1e6
    weight[::32] = 1e-12
    return Weighted(), (torch.randn(64, 64), z, weight)


def test_the_gemm_that_was_planted_is_named() -> None:
    model, args = weighted()
    result = blame(model, *args, policy=ALL)
    assert result.worst == (("b", "wgrad"),)
    by_gemm = {part.gemms: part.alone.on("gradients").size for part in result.gemms if part.layers == ("b",)}
    assert by_gemm["wgrad",] > 10 * by_gemm["fprop",]
    (rule,) = (rule for rule in result.policy.rules if rule.match.name == ("b",))
    assert str(rule.use.wgrad) == "bf16"
    assert rule.use.fprop is not None
    assert rule.use.fprop.quantizes
    assert gradient_effect(model, args, result.policy) == result.left.on("gradients").mean


class Product(Made, a=(64, 64, False), b=(64, 64, False), c=(64, 64, False)):
    """Errors of two layers are multiplied with each other, so that each alone does nothing."""

    def forward(self, x: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
        return 1e-3 * self.c(x) + 1e4 * (self.a(x) - of_a) * (self.b(x) - of_b) + 1


def test_blame_reports_an_effect_of_two_layers_together() -> None:
    torch.manual_seed(2)
    model, x = Product(), torch.randn(64, 64)
    with torch.no_grad():
        args = x, model.a(x), model.b(x)
    result = blame(model, *args, policy=ALL)
    assert result.measure == "output"
    assert "THE SUM OF THE PARTS IS NOT THE WHOLE" in " ".join(str(result).split())
    assert "THE SUM OF THE PARTS IS NOT THE WHOLE: together they do more" in " ".join(str(result).split())
    left_out = {part.layers: part.left_out.on("output").size for part in result.parts}
    whole = result.whole.on("output").size
    assert left_out["a",] < whole / 100
    assert left_out["b",] < whole / 100
    assert left_out["c",] > whole / 2
    assert len(result.worst) == 1  # without either there is no product
    assert result.worst[0][0] in "ab"
    assert result.left.on("output").size < whole / 100


class Difference(nn.Module):
    """Errors of two equal layers cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.b.load_state_dict(self.a.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) - self.b(x) + self.c(x) / 10


def test_blame_reports_effects_of_layers_that_cancel() -> None:
    torch.manual_seed(3)
    result = blame(Difference(), torch.randn(64, 64), policy=ALL, of="output")
    assert "THE SUM OF THE PARTS IS NOT THE WHOLE" in " ".join(str(result).split())
    assert "together they do less" in str(result)
    assert [part.layers for part in result.parts][2] == ("c",)


def test_dropout_gives_an_error_bar_and_leaves_the_generators() -> None:
    model, args = branches(dropout=0.2)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    result = blame(model, *args, policy=ALL, max_runs=40)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.repeats == 3
    assert result.runs <= result.max_runs <= 40
    assert result.parts[0].layers == ("layers.3",)
    spread = result.parts[0].alone.on("gradients")
    assert spread.error is not None
    assert 0 < spread.error < spread.size
    assert f"gradients {spread}".split()[-1] in str(result)
    assert "± is the standard error of the mean of 3 repeats" in " ".join(str(result).split())


def test_stochastic_rounding_is_repeated_and_dropout_of_evaluation_is_not() -> None:
    model, args = branches(dropout=0.2)
    use = {"precision": "mxfp8", "grad_rounding": "stochastic"}
    drawn = {**ALL, "rules": [{"match": {"name": "*"}, "use": use}]}
    assert blame(model.eval(), *args, policy=drawn, max_runs=24).repeats == 3
    once = blame(model, *args, policy=drawn, max_runs=8)
    assert once.repeats == 1
    assert "each effect was measured once, so without error bars" in str(once)
    assert blame(model, *args, policy=ALL, max_runs=8).repeats == 1


def test_a_plan_never_exceeds_the_runs_that_are_allowed() -> None:
    for layers, gemms, repeats, more in itertools.product(
        (1, 2, 3, 7, 30, 126, 1000), (1, 2, 3), (1, 3), (0, 1)
    ):
        for max_runs in (LEAST * repeats, LEAST * repeats + 1, 40, 64, 1000):
            plan = RunPlan.from_counts(layers, gemms, repeats=repeats, max_runs=max_runs, more=more)
            assert plan.runs <= max_runs
            assert min(plan.alone, plan.worst) >= 1
            assert min(plan.left_out, plan.kinds, plan.gemms) >= 0
    exhaustive = RunPlan.from_counts(30, 3, repeats=1, max_runs=100, more=0)
    assert exhaustive.alone == exhaustive.left_out == 30


@pytest.mark.parametrize("max_runs", [8, 13, 24])
def test_no_more_runs_than_announced(max_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    original = Session.run

    def counted(self: Session, *args: Any, **kwargs: Any) -> Any:
        runs.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Session, "run", counted)
    model, args = branches()
    announced: list[str] = []
    result = blame(model, *args, policy=ALL, max_runs=max_runs, announce=announced.append)
    first, second = announced
    assert first == f"blame: at most {max_runs} runs of the model"
    limit = int(re.match(r"blame: at most (\d+) runs of the model: ", second)[1])
    assert len(runs) == result.runs <= limit == result.max_runs <= max_runs
    alone = sorted(name for part in result.parts for name in part.layers if part.alone)
    assert alone == NAMES  # all of them, in groups if need be
    assert "layers.3" in result.parts[0].layers
    assert result.left.on("gradients").size <= result.whole.on("gradients").size / 2


def test_two_policies_that_both_quantize() -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    tensor = {**ALL, "rules": [{"match": {"name": "*"}, "use": {"precision": "fp8", "scaling": "tensor"}}]}
    result = blame(model, x, policy=tensor, against=ALL, max_runs=8, loss_fn=_mean_square, of="loss")
    assert (result.num_layers, result.num_gemms) == (2, 2)
    assert result.runs <= 8
    assert any("every run traced the model anew" in note for note in result.notes)
    losses = [
        audit(model, x, policy=policy, loss_fn=_mean_square).numerics.loss
        for policy in (ALL, tensor, result.policy)
    ]
    assert result.whole.on("loss").mean == losses[1] / losses[0] - 1
    assert result.left.on("loss").mean == losses[2] / losses[0] - 1
    assert result.left.on("loss").size <= result.whole.on("loss").size / 2
    assert Policy.from_dict(result.policy.to_dict()) == result.policy


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def test_blame_tries_only_gemms_whose_decisions_differ() -> None:
    model, args = branches()
    use = {"fprop": "bf16", "dgrad": "mxfp8", "wgrad": "mxfp8"}
    other = {**ALL, "rules": [{"match": {"name": ["layers.0", "layers.3"]}, "use": use}, *ALL["rules"]]}
    result = blame(model, *args, policy=ALL, against=other)
    assert {key for part in result.parts for key in itertools.product(part.layers, part.gemms)} == {
        ("layers.0", "fprop"),
        ("layers.3", "fprop"),
    }
    with pytest.raises(OptionError, match="both policies are policy"):
        blame(model, *args, policy=ALL, against=dict(ALL))
    idle = {**ALL, "rules": [{"match": {"name": "elsewhere"}, "use": "bf16"}, *ALL["rules"]]}
    nothing = blame(model, *args, policy=ALL, against=idle, max_runs=8)
    assert nothing.parts == ()
    assert nothing.notes == ("nothing differs: policy treats all GEMMs of this run as policy does",)


def test_a_reference_that_is_not_finite_is_not_the_policys_fault() -> None:
    model, args = branches()
    with torch.no_grad():
        model.layers[2].bias[0] = math.nan
    result = blame(model, *args, policy=ALL)
    assert result.parts == ()
    assert result.notes == (
        "the gradients are not finite under preset bf16 either: quantization by policy is not the cause",
    )
    assert result.policy == Policy.resolve(ALL)


def test_values_that_are_not_finite_come_before_all() -> None:
    nan, small = Spread.from_values([1.0, math.nan]), Spread.from_values([0.5])
    assert (str(nan), nan.size) == ("not finite", math.inf)
    assert exceeds(nan, 0.5)
    assert not exceeds(nan, math.inf)
    assert falls_short(small, math.inf)
    assert not exceeds(Spread(mean=1.0, error=0.4), 0.5)
    assert exceeds(Spread(mean=1.0, error=0.1), 0.5)
    assert together("loss", []) == 0
    assert str(Spread.from_values([-0.25, -0.25])) == "-25.000% ± 0"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"of": "los"}, OptionError, r"of: unknown measure 'los' \(did you mean 'loss'\?\)"),
        ({"max_runs": 7}, OptionError, "`max_runs` must be a whole number of at least 8, found 7"),
        ({"max_runs": 23, "repeats": 3}, OptionError, "at least 24 for 3 repeats, found 23"),
        ({"repeats": 0}, OptionError, "`repeats` must be a whole number of at least 1, found 0"),
        ({"remove": 0}, OptionError, "`remove` must be a share above 0 and at most 1, found 0"),
        ({"remove": "half"}, OptionError, "`remove` must be a share above 0 and at most 1, found 'half'"),
        ({"policy": "bf16"}, OptionError, "both policies are preset bf16"),
        (
            {"polcy": "ocp"},
            OptionError,
            r"'polcy' is neither an option of blame .* \(did you mean 'policy'\?\)",
        ),
        ({"of": "output"}, ModelError, "blame of 'output' needs a floating-point tensor as its main output"),
    ],
)
def test_blame_refuses_wrong_options_with_a_sentence(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, args = branches()
    with pytest.raises(error, match=message):
        blame(model, *args, **options)


def test_a_difference_of_the_loss_needs_one() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ModelError, match=r"blame of 'loss' needs a loss: .*; this run has output"):
        blame(model, torch.randn(32, 64), of="loss", policy=ALL)
    result = blame(
        model, torch.randn(32, 64), of="loss", policy=ALL, loss_fn=lambda output: output.square().mean()
    )
    assert [part.layers for part in result.parts] == [("0",)]
    assert result.num_gemms == 1  # of backward there is none


def example() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    return Branches(culprit=0), branches()[1], {}


def test_the_command_reads_the_weights_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    (tmp_path / "all.yaml").write_text("version: 1\nrules:\n  - match: {name: '*'}\n    use: mxfp8\n")
    weights = {f"_orig_mod.{name}": value.bfloat16() for name, value in branches()[0].state_dict().items()}
    save_file(weights, tmp_path / "run.safetensors")
    command = ["blame", f"{__name__}:example", "--policy", str(tmp_path / "all.yaml"), "--max-runs", "40"]
    output = ["--weights", str(tmp_path / "run.safetensors"), "-o", str(tmp_path / "policy.yaml")]
    assert main([*command, *output]) == 0
    streams = capsys.readouterr()
    assert streams.err.startswith("blame: at most 40 runs of the model\nblame: at most ")
    assert "6 of layers alone, 6 of layers left out" in streams.err
    assert "note: random" not in streams.out
    assert f"written to {tmp_path / 'policy.yaml'}" in streams.out
    (rule, _) = Policy.load(tmp_path / "policy.yaml").rules
    assert rule.match.name == ("layers.3",)  # the run's culprit; the factory's is another

    assert main([*command, "--of", "loss", "--against", str(tmp_path / "policy.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "on the loss" in printed
    assert "\nversion: 1\n" in printed


def test_weights_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "run.pt").write_bytes(b"")
    for file, reason in {
        "other.safetensors": "the checkpoint has 'other', which the model lacks",
        "run.pt": "run.pt: a pickle, which is never loaded; a factory, package.module:factory, can read",
        "nowhere": "nowhere: no such file or directory",
    }.items():
        assert main(["blame", f"{__name__}:example", "--weights", str(tmp_path / file)]) == 2
        assert reason in capsys.readouterr().err
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "part.safetensors")
    assert main(["audit", f"{__name__}:example", "--weights", str(tmp_path / "part.safetensors")]) == 2
    assert "part.safetensors: the checkpoint has 'bias', which the model lacks" in capsys.readouterr().err


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "blame.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "blame.md", "exec"), names)
    assert Policy.load(tmp_path / "policy.yaml") == names["blamed"].policy
