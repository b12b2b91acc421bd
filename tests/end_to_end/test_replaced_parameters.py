"""Parameters that are swapped, converted or replaced after a compile: results and histories follow."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.one_linear import policy
from torch import Tensor, nn

import mxcompile

DELAYED = {"precision": "fp8", "scaling": "delayed", "history": 3}


class Net(Made, a=(64, 64, False), b=(64, 64, False), cut=lambda: False):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        if self.cut:
            torch._dynamo.graph_break()
        return self.b(x)


def trained(model: nn.Module, use: Any, backend: Any = EagerBackend, **options: Any) -> Any:
    """The compiled `model` after a step."""
    call = torch.compile(model, backend=backend(policy=policy(use), **options))
    step(call, model)
    return call


def step(call: Any, model: nn.Module, size: float = 1.0) -> None:
    call(torch.full((40, 64), size)).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("use", ["mxfp8", "bf16", DELAYED], ids=["mxfp8", "bf16", "delayed"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_swapped_parameter_is_used_in_the_next_call(use: Any, cut: bool):
    model = Net(cut=cut)
    call = trained(model, use)
    torch.utils.swap_tensors(model.b.weight, nn.Parameter(torch.zeros(64, 64)))
    assert not call(torch.ones(40, 64)).any()


def test_a_swapped_parameter_is_used_under_inductor_with_histories_and_a_watch(tmp_path):
    model = Net()
    watch = mxcompile.Watch(tmp_path / "watch.jsonl", every=1)
    call = trained(model, DELAYED, mxcompile.Backend, watch=watch)
    torch.utils.swap_tensors(model.b.weight, nn.Parameter(torch.zeros(64, 64)))
    assert not call(torch.ones(40, 64)).any()


def test_a_converted_model_is_used_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model = Net()
    call = trained(model, "mxfp8")
    before = model.b.weight
    model.to(torch.bfloat16)
    assert model.b.weight is before
    assert call(torch.ones(40, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("way", ["swap", "replace", "set data"])
def test_the_history_of_a_layer_goes_on_with_its_next_parameter(way: str):
    model = Net()
    call = trained(model, DELAYED)
    history, size = model.b.weight_amax_history, model.b.weight.detach().abs().max().item()
    fresh = nn.Parameter(torch.full((64, 64), 3.0))
    if way == "swap":
        torch.utils.swap_tensors(model.b.weight, fresh)
    elif way == "replace":
        model.b.weight = fresh
    else:
        model.b.weight.data = fresh.data
    step(call, model)
    assert model.b.weight_amax_history is history
    torch.testing.assert_close(history[1], torch.tensor([3.0, size, 0.0]))
    assert [gemm.name for report in mxcompile.reports() for gemm in report.gemms if gemm.gemm == "fprop"] == [
        "a",
        "b",
    ]


def test_models_that_share_code_keep_their_histories_apart():
    first, second = Net(), Net()
    call = trained(first, DELAYED)
    backend = EagerBackend(policy=policy(DELAYED))
    torch._dynamo.reset()
    calls = [torch.compile(model, backend=backend) for model in (first, second)]
    for call, model, size in zip(calls, (first, second), (1.0, 2.0), strict=True):
        step(call, model, size)
    assert first.a.weight_amax_history[0].tolist() == [1.0, 1.0, 0.0]
    assert second.a.weight_amax_history[0].tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("use", ["mxfp8", DELAYED], ids=["mxfp8", "delayed"])
def test_a_model_that_nobody_keeps_is_freed(use: Any):
    model = Net()
    trained(model, use)
    alive = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
