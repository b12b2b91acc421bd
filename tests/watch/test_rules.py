"""Rules: when they fire, what they do, and how their mistakes are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import Tensor
from watched_models import Model, batch

import mxcompile
from mxcompile.compiler.session.session import compiled_policy
from mxcompile.errors import OptionError, WatchError
from mxcompile.watch import Watch, read
from mxcompile.watch.rules import Rule


def row(underflow: float | None, layer: str = "a.up", **more: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "gemm": "dgrad",
        "operand": "dy",
        "role": "ffn_in",
        "underflow": underflow,
        **more,
    }


def test_rule_fires_once_after_enough_samples():
    rule = Rule.from_mapping({"when": {"underflow": "> 0.3", "over": 2}})
    values = [0.4, 0.2, 0.4, 0.5, 0.6, None, 0.4, 0.4]
    assert [rule.fires(row(value)) for value in values] == [False] * 3 + [True] + [False] * 3 + [True]


@pytest.mark.parametrize(("operand", "role"), [("dy", "ffn_in"), (["w", "dy"], ("head", "ffn_in"))])
def test_rule_fires_only_for_its_layer_operands_and_roles(operand: Any, role: Any):
    when = {"underflow": ">= 0.5"}
    rule = Rule.from_mapping({"when": when, "layer": "*.up", "operand": operand, "role": role})
    assert rule.fires(row(0.5))
    assert not rule.fires(row(0.5, layer="a.down"))
    assert not rule.fires(row(0.5, operand="x"))
    assert not rule.fires(row(0.5, role="qkv"))


def test_rule_fires_only_if_all_conditions_hold():
    rule = Rule.from_mapping({"when": {"underflow": "> 0.1", "sqnr": "<2e1"}})
    assert not rule.fires(row(0.5, sqnr=25.0))
    assert rule.fires(row(0.5, sqnr=15.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({}, "'when' must name a statistic"),
        ({"when": {"underflw": "> 1"}}, "did you mean 'underflow'"),
        ({"when": {"underflow": "0.3"}}, "must be like '> 0.3', found '0.3'"),
        ({"when": {"underflow": "> 0.3", "over": 0}}, "over must be a number of samples"),
        ({"when": {"underflow": "> 0.3"}, "do": "stp"}, "did you mean 'stop'"),
        ({"when": {"underflow": "> 0.3"}, "layers": "a"}, "did you mean 'layer'"),
        ({"when": {"underflow": "> 0.3"}, "role": "ffn_inn"}, "did you mean 'ffn_in'"),
        ({"when": {"underflow": "> 0.3"}, "gemm": "fwd"}, "unknown GEMM 'fwd'; allowed: fprop, dgrad, wgrad"),
        ({"when": {"underflow": "> 0.3"}, "operand": "dz"}, "unknown operand 'dz'"),
        ({"when": {"underflow": "> 0.3"}, "layer": "re:("}, "is not a regular expression"),
        ({"when": {"underflow": "> 0.3"}, "layer": 3}, "expected a glob"),
        ({"when": {"underflow": "> e"}}, "must be like '> 0.3', found '> e'"),
        ({"when": {"underflow": "> 1e"}}, "must be like '> 0.3', found '> 1e'"),
        ({"when": {"underflow": "> 0.3"}, "operand": "y"}, "allowed: amax, smallest, nan, inf, over"),
        ({"when": "underflow > 0.3"}, "'when' must name a statistic"),
        ({"when": {"over": 3}}, "'when' must name a statistic"),
        ("stop", "a watch rule must be a mapping, found 'stop'"),
    ],
)
def test_watch_refuses_rules_that_do_not_parse(text: Any, message: str):
    with pytest.raises(OptionError, match=message):
        Watch(print, rules=[text])


def test_an_operand_that_is_not_measured_is_a_mistake():
    rules = [{"when": {"amax": "> 1"}, "operand": "dw"}]
    with pytest.raises(OptionError, match="operand 'dw' is not measured"):
        Watch(print, rules=rules)
    Watch(print, rules=rules, operands=["dw"])


def test_watch_with_invalid_layer_expression_raises():
    with pytest.raises(OptionError, match="is not a regular expression"):
        Watch(print, layers="re:(")


def test_unmatched_watch_rule_gives_a_single_warning(caplog: pytest.LogCaptureFixture):
    model = Model()
    rules = [{"when": {"amax": "> 1e9"}, "layer": layer} for layer in ("blocks.0.up", "block.0.up")]
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        fallback_run(model, 3, watch=Watch(lambda _: None, every=1, rules=rules))
    assert caplog.messages == ["watch: rule 2 matches no operand that step 0 measures"]


def test_a_run_warns_and_stops(caplog: pytest.LogCaptureFixture):
    model, records = Model(), []
    rules = [
        {"when": {"amax": "> 100"}, "layer": "blocks.0.up", "gemm": "fprop", "operand": "x"},
        {
            "when": {"amax": "> 100", "over": 2},
            "layer": "blocks.0.up",
            "gemm": "fprop",
            "operand": "x",
            "do": "stop",
        },
    ]
    watch = Watch(records.append, every=1, rules=rules)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        for step in range(4):
            if step == 1:
                model.blocks[0].norm.weight.data.fill_(1e4)
            compiled(batch(step)).sum().backward()
            optimizer.step()

    with caplog.at_level(logging.WARNING, "mxcompile.watch"), pytest.raises(WatchError) as stopped:
        run()
    assert str(stopped.value).startswith("step 2: x of blocks.0.up fprop: amax > 100 (")
    assert str(stopped.value).endswith(") in 2 samples")
    assert [message[:40] for message in caplog.messages] == ["step 1: x of blocks.0.up fprop: amax > 1"]
    kinds = [(record["kind"], record.get("step")) for record in records]
    assert kinds == [("run", None), ("sample", 0), ("sample", 1), ("rule", 1), ("sample", 2), ("rule", 2)]


def fallback_run(model: Model, steps: int, **options: Any) -> list[Tensor]:
    """Gradients of a run whose second step has a large output gradient."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=EagerBackend(root=model, **options))
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.0), []
    for step in range(steps):
        (compiled(batch(step)) * (1e3 if step == 1 else 1.0)).sum().backward()
        optimizer.step()
        results += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
    return results


LARGE = {"when": {"amax": "> 100"}, "layer": "blocks.1.down", "gemm": "dgrad", "operand": "dy", "do": "bf16"}
POLICY = {
    "version": 1,
    "rules": [
        {"match": {"name": "blocks.1.down"}, "use": {"precision": "mxfp8", "rounding": "floor"}},
        {"match": {"name": "blocks.*"}, "use": {"precision": "mxfp8", "grad_dtype": "e5m2"}},
    ],
}


def test_a_rule_puts_a_gemm_into_bf16(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """From the next step on, by one compile; report, samples and a policy file for a restart say so."""
    model = Model()
    watch = Watch(tmp_path / "run.jsonl", every=1, rules=[LARGE])
    backend_compiles = torch._dynamo.utils.counters["stats"]
    before = backend_compiles["unique_graphs"]
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        results = fallback_run(model, 4, watch=watch, policy=POLICY)
    assert backend_compiles["unique_graphs"] - before == 2
    (report,) = mxcompile.reports()
    precisions = {(gemm.name, gemm.gemm): gemm.precision for gemm in report.gemms}
    assert len(precisions) == len(report.gemms)
    assert [key for key, precision in precisions.items() if precision != "mxfp8"] == [
        ("blocks.1.down", "dgrad")
    ]
    (kept,) = (gemm for gemm in report.gemms if gemm.precision != "mxfp8")
    assert kept.code == "watch"
    assert kept.reason.startswith("watch: step 1: dy of blocks.1.down dgrad: amax > 100 (")
    assert compiled_policy(model).rules[0].kept
    records = [*read(tmp_path / "run.jsonl")]
    assert [(record["kind"], record.get("step")) for record in records] == [
        ("run", None), ("sample", 0), ("sample", 1), ("rule", 1), ("sample", 2), ("sample", 3),
    ]  # fmt: skip
    assert records[3]["effect"] == "blocks.1.down dgrad is in BF16 from the next step"
    assert records[3]["policy"] == str(tmp_path / "run.policy.yaml")
    keys = {(row["layer"], row["gemm"]) for row in records[4]["rows"]}
    assert ("blocks.1.down", "dgrad") not in keys
    assert ("blocks.1.down", "wgrad") in keys
    assert len(caplog.messages) == 1
    restarted = fallback_run(model, 4, policy=mxcompile.Policy.load(tmp_path / "run.policy.yaml"))
    plain = fallback_run(model, 4, policy=POLICY)
    count = len(results) // 4
    assert all(map(torch.equal, results[: 2 * count], plain[: 2 * count]))
    assert all(map(torch.equal, results[2 * count :], restarted[2 * count :]))
    assert not all(map(torch.equal, results[2 * count :], plain[2 * count :]))


def test_blocks_compiled_one_by_one(tmp_path: Path):
    """Only the block with the layer is compiled again, and only that changes."""
    model = Model()
    watch = Watch(tmp_path / "run.jsonl", every=1, rules=[LARGE])
    backend = EagerBackend(root=model, parts=("blocks.0", "blocks.1"), watch=watch)
    for block in model.blocks:
        block.compile(backend=backend)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for scale in (1.0, 1e3, 1.0, 1.0):
        (model(batch(0).requires_grad_()) * scale).sum().backward()
        watch.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    (report,) = mxcompile.reports()
    kept = [(gemm.name, gemm.gemm) for gemm in report.gemms if gemm.precision != "mxfp8"]
    assert kept == [("blocks.1.down", "dgrad")]
    assert len(report.gemms) == 12
    last = [record for record in read(tmp_path / "run.jsonl") if record["kind"] == "sample"][-1]
    assert len({(row["layer"], row["gemm"]) for row in last["rows"]}) == 11


def test_a_policy_that_cannot_be_written_ends_no_run(caplog: pytest.LogCaptureFixture):
    model, records = Model(), []
    watch = Watch(records.append, every=1, rules=[LARGE], policy="/proc/nowhere/run.policy.yaml")
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        fallback_run(model, 3, watch=watch)
    assert "cannot write the policy to /proc/nowhere/run.policy.yaml" in caplog.text
    assert [record["kind"] for record in records] == ["run", "sample", "sample", "rule", "sample"]
    assert ("blocks.1.down", "dgrad") not in {(row["layer"], row["gemm"]) for row in records[-1]["rows"]}


def test_a_rule_needs_a_place_for_its_policy():
    with pytest.raises(OptionError, match=r"Watch\(policy='run.policy.yaml'\)"):
        Watch(print, rules=[LARGE])
