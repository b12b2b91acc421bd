"""Calls past a limit of Dynamo run as Python: the report says so, and strict mode raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import EVERYTHING
from test_left_to_python import WIDTH, batch
from torch import Tensor, nn
from ways import report_of_all, whole

import mxcompile
from mxcompile.errors import UnsupportedError
from mxcompile.report.data.record import NOT_COMPILED

pytestmark = pytest.mark.usefixtures("messages")


def scaled(model: nn.Module) -> nn.Module:
    """`model`, each different scale of which is another kind of call."""

    class Scaled(Made, inner=lambda: model):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return self.inner(x) * scale

    return Scaled()


LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@pytest.mark.parametrize("limit", LIMITS)
def test_calls_past_a_limit_are_in_the_report(limit: str, messages: Any, tmp_path: Path):
    file = tmp_path / "report.json"
    call = whole(scaled(nn.Linear(WIDTH, WIDTH)), policy=EVERYTHING, report=file)
    few = torch._dynamo.config.patch({limit: 2, "specialize_float": True})
    with few, torch.no_grad():
        for scale in (1.0, 2.0):
            call(batch(), scale)
        assert report_of_all().summary.warnings == ()
        for scale in (3.0, 4.0):
            call(batch(), scale)
    (warning,) = report_of_all().summary.warnings
    assert warning.startswith(f"{limit} (2) reached by")
    assert "Scaled.forward" in warning
    assert warning in messages()
    assert json.loads(file.read_text())["summary"]["warnings"] == [warning]


@pytest.mark.parametrize("limit", LIMITS)
def test_each_call_past_a_limit_raises_under_strict(limit: str):
    call = whole(scaled(nn.Linear(WIDTH, WIDTH)), policy=EVERYTHING, strict=True)
    few = torch._dynamo.config.patch({limit: 2, "specialize_float": True})
    with few, torch.no_grad():
        expected = call(batch(), 1.0)
        call(batch(), 2.0)
        for scale in (3.0, 4.0):
            with pytest.raises(UnsupportedError, match=limit):
                call(batch(), scale)
        assert torch.equal(call(batch(), 1.0), expected), "what is compiled still runs"


def test_function_past_a_limit_raises_under_strict():
    layer = nn.Linear(WIDTH, WIDTH)
    backend = EagerBackend(policy=EVERYTHING, strict=True)
    call = torch.compile(lambda x: layer(x), backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        call(batch(3))
        call(batch(5))
        with pytest.raises(UnsupportedError, match="recompile_limit"):
            call(batch(7))


def scale_by(x: Tensor, scale: float) -> Tensor:
    return x * scale


class WithHelper(Made, layer=(WIDTH, WIDTH)):
    """Only a function without products is compiled for many kinds of calls."""

    def multiply(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(6):
            x = scale_by(x, number / 4)
            torch._dynamo.graph_break()
        return self.multiply(x)


def test_recompile_limit_of_a_function_without_products_passes_strict_mode(messages: Any):
    few = torch._dynamo.config.patch(recompile_limit=2, specialize_float=True)
    with few, torch.no_grad():
        whole(WithHelper(), policy=EVERYTHING, strict=True)(batch())
    assert report_of_all().summary.warnings == ()
    assert messages() == []


def test_second_model_past_the_limit_has_a_report_of_its_own(messages: Any):
    first, second = (whole(scaled(nn.Linear(WIDTH, WIDTH)), policy=EVERYTHING) for _ in range(2))
    few = torch._dynamo.config.patch(recompile_limit=2, specialize_float=True)
    with few, torch.no_grad():
        for scale in (1.0, 2.0):
            first(batch(), scale)
        second(batch(), 3.0)
    assert [message.partition(" ")[0] for message in messages()] == ["recompile_limit", "nothing"]
    compiled, other = mxcompile.reports()
    assert not compiled.summary.warnings
    assert {gemm.kernel for gemm in other.gemms} == {NOT_COMPILED}
    assert messages()[0] in other.summary.warnings
