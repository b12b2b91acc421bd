"""The program's saved-tensor hooks get the codes and scales that forward saves as bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import mxcompile

PRECISIONS = ["mxfp8", "mxfp4", "mxint8", "nvfp4", {"precision": "fp8", "scaling": "tensor"}]


def network(backend: Any, use: Any) -> Any:
    """A compiled network whose layers have one precision."""
    rule = {"match": {"name": "*"}, "use": use}
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    return torch.compile(layers, backend=backend(policy={"version": 1, "rules": [rule]}))


@pytest.fixture(params=PRECISIONS, ids=str)
def call(request: pytest.FixtureRequest) -> Any:
    return network(EagerBackend, request.param)


def gradients(call: Any, hooks: AbstractContextManager[Any]) -> list[Tensor]:
    call.zero_grad()
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    with hooks:
        y = call(x)
    y.square().mean().backward()
    assert any(gemm.precision != "bf16" for report in mxcompile.reports() for gemm in report.gemms)
    return [parameter.grad.clone() for parameter in call.parameters()]


def test_hook_that_compresses_floats_gets_no_codes(call: Any):
    """FP8 tensors have no amax in torch, and integers instead of codes would be other values."""
    dtypes: set[torch.dtype] = set()

    def pack(value: Tensor) -> Any:
        dtypes.add(value.dtype)
        if not value.is_floating_point():
            return value
        step = value.abs().amax() / 32_767
        return (value / step).round().to(torch.int16), step

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0] * packed[1]

    plain = gradients(call, nullcontext())
    hooked = gradients(call, saved_tensors_hooks(pack, unpack))
    assert dtypes == {torch.float32, torch.uint8}
    for expected, value in zip(plain, hooked, strict=True):
        assert (expected - value).norm() < 0.05 * expected.norm()


def test_hook_that_returns_all_values_in_the_models_dtype_changes_nothing():
    """Compiled code reads codes and scales from memory, so that it takes floats for other codes."""
    call = network(mxcompile.Backend, "mxfp8")
    hooks = saved_tensors_hooks(lambda value: value.double(), lambda value: value.float())
    plain, hooked = gradients(call, nullcontext()), gradients(call, hooks)
    assert all(torch.equal(*pair) for pair in zip(plain, hooked, strict=True))


def as_graph(hook: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(hook, (graph.placeholder("value"),)))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("filtering", ["donated", "all"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "function"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
def test_hook_that_rounds_all_values_rounds_no_codes(dtype: torch.dtype, graph: bool, filtering: str):
    """E5M2 has two bits of a code, and another exponent; AOTAutograd makes graphs a part of the code."""
    hooks: list[Any] = [
        lambda value: (value.dtype, value.to(dtype)),
        lambda packed: packed[1].to(packed[0]),
    ]
    if graph:
        hooks = [as_graph(hook) for hook in hooks]
    plain = gradients(network(mxcompile.Backend, "mxfp8"), nullcontext())
    with functorch_config.patch(saved_tensors_hooks_filtering_mode=filtering):
        hooked = gradients(network(mxcompile.Backend, "mxfp8"), saved_tensors_hooks(*hooks))
    differences = [
        ((expected - value).norm() / expected.norm()).item()
        for expected, value in zip(plain, hooked, strict=True)
    ]
    assert max(differences) < 0.15, differences


def test_checkpointed_call_gives_the_same_gradients(call: Any):
    """`torch.utils.checkpoint` packs nothing in the first call, and computes what was saved in backward."""
    plain = gradients(call, nullcontext())
    call.zero_grad()
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    checkpoint(call, x, use_reentrant=False).square().mean().backward()
    checkpointed = [parameter.grad for parameter in call.parameters()]
    assert all(torch.equal(*pair) for pair in zip(plain, checkpointed, strict=True))
