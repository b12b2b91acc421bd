"""The tripwire: the first NaN or Inf of a run is named before an optimizer has stepped."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.paces import mostly_slow
from torch import Tensor
from watched_models import Model, batch, samples, train

from mxcompile import ops
from mxcompile.errors import NonFiniteError
from mxcompile.watch import Watch
from mxcompile.watch.recorder import finding


def weight(model: Model) -> Tensor:
    model.blocks[1].up.weight.data[3, 5] = math.inf
    return batch(0)


def poison_input(model: Model) -> Tensor:
    x = batch(0)
    x[2, 3] = math.nan
    return x


def outlier(model: Model) -> Tensor:
    """FP32 overflows in the first block's sum."""
    model.blocks[0].down.weight.data.fill_(3e38)
    return batch(0)


FAULTS = {
    "weight": (weight, ("blocks.1.up", "fprop", "w"), "first in the weight"),
    "input": (poison_input, ("blocks.0.up", "fprop", "x"), "first in the model's input"),
    "overflow": (outlier, ("blocks.1.up", "fprop", "x"), "first after blocks.0.down fprop"),
    "loss": (None, ("blocks.1.down", "dgrad", "dy"), "first in the loss"),
}


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, "weight", "loss"))
def test_nonfinite_stop_names_the_first_operand(fault: str):
    inject, operand, origin = FAULTS[fault]
    model, records = Model(), []
    watch = Watch(records.append, every=None, nonfinite="stop")
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(compiled, model, steps=1)
    assert records == []
    x = batch(0) if inject is None else inject(model)
    (compiled(x.requires_grad_()).sum() * (math.inf if inject is None else 1.0)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(
        NonFiniteError, match=f"step 1: NaN or Inf in {operand[2]} of {operand[0]} {operand[1]}.*{origin}"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    (record,) = records
    assert (record["layer"], record["gemm"], record["operand"]) == operand
    assert (record["kind"], record["step"], record["rank"]) == ("nonfinite", 1, 0)


def test_overflow_of_a_watched_product_is_named():
    """Its operands are finite, its result, if it is watched, is not."""
    model, records = Model(), []
    watch = Watch(records.append, every=None, nonfinite="warn", operands=["x", "w", "y"])
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    compiled(outlier(model).requires_grad_()).sum().backward()
    watch.close()
    (record,) = records
    assert (record["layer"], record["gemm"], record["operand"]) == ("blocks.0.down", "fprop", "y")
    assert record["origin"] == "first in the product, whose operands are finite"


def test_a_warning_and_a_check(caplog: pytest.LogCaptureFixture, tmp_path: Any):
    """With samples too; `check` tells it where no optimizer steps, once."""
    model = Model()
    watch = Watch(tmp_path / "run.jsonl", every=2, nonfinite="warn")
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        train(compiled, model, steps=2)
        assert caplog.messages == []
        weight(model)
        compiled(batch(0)).sum().backward()
        watch.check()
        assert "step 2: NaN or Inf in w of blocks.1.up fprop" in caplog.text
        watch.close()
    assert len(caplog.messages) == 1
    assert [*samples(tmp_path / "run.jsonl")] == [0, 2]


def test_nonfinite_counts_nan_in_scales_and_values():
    assert ops.nonfinite(torch.tensor([0, 255, 254, 255], dtype=torch.uint8)).tolist() == [2]
    assert ops.nonfinite(torch.tensor([0.0, math.nan, -math.inf])).tolist() == [2]


def test_finding_counts_operands_after_the_first():
    x, y = ("a", "fprop", "x"), ("b", "fprop", "x")
    result = finding(
        [(x, 0), (("a", "fprop", "w"), 0), (y, 3), (("c", "fprop", "x"), 1), (("c", "wgrad", "x"), 1)]
    )
    assert result == {
        "layer": "b",
        "gemm": "fprop",
        "operand": "x",
        "count": 3,
        "origin": "first after a fprop, whose operands are finite",
        "arrived": 2,
    }
