"""What a report says is kept for backward, against what autograd is really given to keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.blocks import WIDTH, block, features
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn

import mxcompile


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 200), nn.ReLU(), nn.Linear(200, WIDTH))


def forward(model: nn.Module, x: Tensor, policy: str) -> tuple[mxcompile.Report, int]:
    """The report, and the bytes of the tensors that a compiled forward really saves.

    Inputs and parameters are kept anyway and cost nothing.
    """
    torch._dynamo.reset()
    mxcompile.clear_reports()
    compiled = torch.compile(model, backend=EagerBackend(policy=policy), fullgraph=True)
    input_pointers = {t.untyped_storage().data_ptr() for t in [x, *model.parameters()]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compiled(x)
    assert output.requires_grad
    (report,) = mxcompile.reports()
    return report, sum(size for address, size in kept.items() if address not in input_pointers)


MODELS: dict[str, Any] = {"mlp": mlp, "block": block}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_that_autograd_keeps(name: str, dtype: torch.dtype):
    model, x = MODELS[name]().to(dtype), features(4, 50, WIDTH).to(dtype).requires_grad_()
    report, kept = forward(model, x, "nvidia")
    without, kept_without = forward(model, x, "bf16")
    assert report.summary.saved_bytes == kept
    assert without.summary.saved_bytes == without.summary.saved_bytes_bf16 == kept_without
    assert kept < kept_without
    estimate = report.summary.saved_bytes_bf16  # without a second compile; it does not flatter
    assert 0.9 * kept_without < estimate <= kept_without
