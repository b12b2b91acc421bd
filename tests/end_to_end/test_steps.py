"""Rules for some training steps: each phase of a run computes as its own policy would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mxcompile
from mxcompile.policy import Policy

STEPS = 7
ENDS: dict[str, Any] = {
    "version": 1,
    "preset": "ocp",
    "rules": [
        {"match": {"steps": {"first": 2}}, "use": "bf16"},
        {"match": {"steps": {"last": 1, "of": STEPS - 1}, "name": "*.down"}, "use": "bf16"},
    ],
}
PHASES = ["bf16", "bf16", "ocp", "ocp", "ocp", "last", "last"]
POLICIES: dict[str, Any] = {
    "bf16": "bf16",
    "ocp": "ocp",
    "last": {"version": 1, "preset": "ocp", "rules": [{"match": {"name": "*.down"}, "use": "bf16"}]},
}
Step = Callable[[int], Tensor]


class Block(Made, norm=lambda: nn.LayerNorm(32), up=(32, 64), down=(64, 32)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    mxcompile.clear_reports()
    counters.clear()
    return nn.Sequential(Block(), Block())


def trained(model: nn.Module, call_of: Callable[[int], Any], steps: range) -> list[Tensor]:
    """Trains with two micro-batches and a validation in each step. Returns the weights after each step."""
    optimizer, weights = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in steps:
        torch.manual_seed(step)
        for _ in range(2):
            call_of(step)(torch.randn(16, 32)).square().mean().backward()
        with torch.no_grad():
            call_of(step)(torch.randn(16, 32))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return weights


def by_hand(steps: range) -> list[Tensor]:
    """Returns the weights of a run that changes to another compiled model in each phase."""
    model = build()
    calls = {
        name: torch.compile(model, backend=EagerBackend(policy=Policy.resolve(policy)))
        for name, policy in POLICIES.items()
    }
    return trained(model, lambda step: calls[PHASES[step]], steps)


def test_weights_are_those_of_a_run_that_changes_its_policy_by_hand():
    expected, model = by_hand(range(STEPS)), build()
    call = torch.compile(model, backend=EagerBackend(policy=Policy.from_dict(ENDS)))
    for weight, wanted in zip(trained(model, lambda _: call, range(STEPS)), expected, strict=True):
        torch.testing.assert_close(weight, wanted, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 6  # three phases, each with and without gradients


def test_a_report_for_each_phase_names_its_steps(tmp_path: Path):
    model = build()
    backend = EagerBackend(policy=Policy.from_dict(ENDS), report=tmp_path / "report.json")
    call = torch.compile(model, backend=backend)
    trained(model, lambda _: call, range(STEPS))
    assert [report.summary.policy for report in mxcompile.reports()] == [
        "policy, steps 0 to 1", "policy, steps 2 to 4", "policy, from step 5",
    ]  # fmt: skip
    assert [report.summary.flop_share for report in mxcompile.reports()] == pytest.approx([0, 1, 0.5])
    last = mxcompile.Report.load(tmp_path / "report.json")
    assert last.summary.policy == "policy, from step 5"
    assert {gemm.reason for gemm in last.gemms if gemm.precision != "mxfp8"} == {"policy: rule 2"}


def test_a_run_that_goes_on_from_a_checkpoint_is_in_the_phase_of_its_step():
    model = build()
    watch = mxcompile.Watch(every=None, first=4)
    call = torch.compile(model, backend=EagerBackend(policy=Policy.from_dict(ENDS), watch=watch))
    weights = trained(model, lambda _: call, range(4, STEPS))
    model = build()
    calls = {
        name: torch.compile(model, backend=EagerBackend(policy=POLICIES[name])) for name in ("ocp", "last")
    }
    expected = trained(model, lambda step: calls[PHASES[step]], range(4, STEPS))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_samples_of_steps_with_casts_name_the_phase(tmp_path: Path):
    model = build()
    watch = mxcompile.Watch(tmp_path / "run.jsonl", every=2)
    call = torch.compile(model, backend=EagerBackend(policy=Policy.from_dict(ENDS), watch=watch))
    trained(model, lambda _: call, range(STEPS))
    watch.close()
    samples = [
        record for record in mxcompile.watch.read(tmp_path / "run.jsonl") if record["kind"] == "sample"
    ]
    assert [(record["step"], record["phase"]) for record in samples] == [
        (2, "steps 2 to 4"), (4, "steps 2 to 4"), (6, "from step 5"),
    ]  # fmt: skip


def test_blocks_that_are_compiled_alone_change_together(caplog: pytest.LogCaptureFixture):
    model = mxcompile.compile(build(), policy=ENDS)
    with caplog.at_level("WARNING", logger="mxcompile"):
        trained(model, lambda _: model, range(3))
    assert [report.summary.policy for report in mxcompile.reports()] == [
        "policy, steps 0 to 1", "policy, steps 2 to 4",
    ]  # fmt: skip
    assert [report.summary.flop_share for report in mxcompile.reports()] == pytest.approx([0, 1])
    assert not [record for record in caplog.records if record.name.startswith("mxcompile")]


def test_strict_accepts_rules_of_other_steps_and_refuses_rules_without_layers():
    data = {
        **ENDS,
        "rules": [*ENDS["rules"], {"match": {"steps": {"from": 9}, "name": "*.gone"}, "use": "bf16"}],
    }
    torch.compile(build(), backend=EagerBackend(policy=ENDS, strict=True))(torch.randn(16, 32))
    with pytest.raises(Exception, match="rule 3 matched no layer"):
        torch.compile(build(), backend=EagerBackend(policy=data, strict=True))(torch.randn(16, 32))


def test_commands_without_a_run_name_the_rules_of_other_steps(caplog: pytest.LogCaptureFixture):
    rules = [{"match": {"steps": {"first": 1}}, "use": "bf16"}, {"match": {"name": "*"}, "use": "mxfp8"}]
    data, x = {"version": 1, "preset": "inference", "rules": rules}, torch.randn(16, 32)
    expected = "policy: rule 1 decides nothing here: it is limited to step 0 of training"
    assert expected in mxcompile.audit(build(), x, policy=data, loss_fn=torch.sum).numerics.notes
    with caplog.at_level("WARNING", logger="mxcompile"):
        assert mxcompile.explain(build(), x, policy=data).summary.policy == "policy, from step 1"
        stored = mxcompile.quantize_weights_(build(), data, args=(x,), progress=False)
    assert {weight.reason for weight in stored.weights} == {"policy: rule 2"}
    assert caplog.messages.count(expected) == 2  # of `explain` and of this call


def test_strict_allows_a_rule_whose_layers_go_to_a_rule_of_other_steps():
    """A warm-up in BF16 over rules that quantize: they decide once it is over."""
    rules = [{"match": {"steps": {"first": 1}}, "use": "bf16"}, {"match": {"name": "*"}, "use": "mxfp8"}]
    policy = {"version": 1, "preset": "bf16", "rules": rules}
    model = build()
    call = torch.compile(model, backend=EagerBackend(policy=policy, strict=True))
    trained(model, lambda _: call, range(2))
    assert [{gemm.precision for gemm in report.gemms} for report in mxcompile.reports()] == [
        {"bf16"},
        {"mxfp8"},
    ]


def test_optimizer_that_gets_the_parameters_later_is_counted():
    model = build()
    watch = mxcompile.Watch(every=None)
    call = torch.compile(model, backend=EagerBackend(policy=ENDS, watch=watch))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for step in range(3):
        call(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        if step == 0:
            optimizer.add_param_group({"params": list(model.parameters())})
    assert watch.next_step == 2


def test_optimizer_of_copies_of_the_weights_warns_that_no_step_is_counted(caplog: pytest.LogCaptureFixture):
    model = build()
    call = torch.compile(model, backend=EagerBackend(policy=ENDS))
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for _ in range(5):
        call(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    warnings = [text for text in caplog.messages if "no optimizer with a parameter of the model" in text]
    assert len(warnings) == 1
