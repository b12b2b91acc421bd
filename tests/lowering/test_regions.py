"""Traces of the profiler name layers and GEMMs, where Inductor marks its calls; other code has no regions."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import every
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

GEMMS = {f"{layer} {gemm}" for layer in ("0", "2") for gemm in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize("marked", [True, False])
def test_a_trace_names_layers(marked: bool):
    """Each product lies inside the region of its layer and GEMM, once a call."""
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    options = {"policy": every("mxfp8"), "inductor": {"profiler_mark_wrapper_call": marked}}
    compiled = torch.compile(model, backend="mxfp8", options=options)

    def step() -> None:
        compiled(torch.randn(40, 64).requires_grad_()).sum().backward()

    _, code = run_and_get_code(step)
    assert any("mx_region" in line for line in code) == marked
    # PyTorch 2.11 warns where events do not accumulate
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        step()
    events = trace.events()
    regions = [event for event in events if event.name in GEMMS]
    assert sorted(event.name for event in regions) == (sorted(GEMMS) if marked else [])
    products = [event for event in events if event.name in ("aten::mm", "aten::addmm")]
    assert len(products) == len(GEMMS)
    for span in (event.time_range for event in products if marked):
        around = [region.time_range for region in regions]
        assert sum(other.start <= span.start and span.end <= other.end for other in around) == 1
