"""Rules: when they fire, what they do, and how their mistakes are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from watched_models import Model, batch

from mxcompile.errors import OptionError, WatchError
from mxcompile.watch import Watch
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


def test_it_fires_once_after_enough_samples():
    rule = Rule.of({"when": {"underflow": "> 0.3", "over": 2}})
    values = [0.4, 0.2, 0.4, 0.5, 0.6, None, 0.4, 0.4]
    assert [rule.fires(row(value)) for value in values] == [False] * 3 + [True] + [False] * 3 + [True]


def test_where_it_looks():
    rule = Rule.of({"when": {"underflow": ">= 0.5"}, "layer": "*.up", "operand": "dy", "role": "ffn_in"})
    assert rule.fires(row(0.5))
    assert not rule.fires(row(0.5, layer="a.down"))
    assert not rule.fires(row(0.5, operand="x"))
    assert not rule.fires(row(0.5, role="qkv"))


def test_all_conditions_hold():
    rule = Rule.of({"when": {"underflow": "> 0.1", "sqnr": "<2e1"}})
    assert not rule.fires(row(0.5, sqnr=25.0))
    assert rule.fires(row(0.5, sqnr=15.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'when' names a statistic"),
        ({"when": {"underflw": "> 1"}}, "did you mean 'underflow'"),
        ({"when": {"underflow": "0.3"}}, "is like '> 0.3', found '0.3'"),
        ({"when": {"underflow": "> 0.3", "over": 0}}, "over is a number of samples"),
        ({"when": {"underflow": "> 0.3"}, "do": "stp"}, "did you mean 'stop'"),
        ({"when": {"underflow": "> 0.3"}, "layers": "a"}, "did you mean 'layer'"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        Rule.of(given)


def test_a_run_warns_and_stops(caplog: pytest.LogCaptureFixture):
    """The rule that stops does so before the optimizer has changed a weight, after the sample is written."""
    torch.manual_seed(0)
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
