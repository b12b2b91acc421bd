"""A layer whose autocast the model turns off says so in its record, if it is quantized."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.reports import report_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SAYS = "the model turns autocast off here"
BOTH = {"version": 1, "rules": [{"match": {"name": "[ab]"}, "use": "mxfp8"}]}


def as_it_is(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return run(x)


def checkpointed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(run, x, use_reentrant=False)


class Island(nn.Module):
    """A layer under autocast, and two where it is turned off; one of these is not quantized."""

    def __init__(self, call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.call(lambda z: self.c(self.b(z)), y.float())


def records_without_autocast(
    model: nn.Module, *, autocast: bool, training: bool = False
) -> set[tuple[str, str]]:
    """Layer and kind of the records that say that autocast is turned off."""
    x = torch.randn(40, 64, requires_grad=training)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = report_of(model, x, training=training, policy=BOTH)
    assert {gemm.precision for gemm in report.gemms if gemm.name != "c"} == {"mxfp8"}
    return {(gemm.name, gemm.gemm) for gemm in report.gemms if SAYS in gemm.reason}


@pytest.mark.parametrize(
    ("autocast", "training", "expected"),
    [(True, False, ["fprop"]), (True, True, ["fprop", "dgrad", "wgrad"]), (False, False, [])],
    ids=["inference", "training", "no outer autocast"],
)
def test_quantized_layer_in_disabled_autocast_is_reported(
    autocast: bool, training: bool, expected: list[str]
) -> None:
    records = records_without_autocast(Island(as_it_is), autocast=autocast, training=training)
    assert records == {("b", gemm) for gemm in expected}


def test_checkpointed_layer_in_disabled_autocast_is_reported() -> None:
    assert ("b", "fprop") in records_without_autocast(Island(checkpointed), autocast=True, training=True)


def test_autocast_inside_of_the_model_counts() -> None:
    class Inside(Island):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    assert records_without_autocast(Inside(as_it_is), autocast=False) == {("b", "fprop")}
