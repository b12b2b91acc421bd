"""Generating code for another machine leaves this one as it was."""

from __future__ import annotations

import pytest
import torch
import triton
from helpers.written import Written
from llama_block import block
from torch._dynamo import device_interface
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor

import mxcompile
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.standin import stand_in

_OWNERS = (torch.cuda, torch.version, triton_helpers, triton, FakeTensor, torch._inductor.graph.GraphLowering)


def _state():
    """Every attribute that a stand-in could have changed, by identity."""
    attributes = {
        (owner.__name__, name): id(value) for owner in _OWNERS for name, value in vars(owner).items()
    }
    tables = (
        device_interface.device_interfaces,
        device_interface.caching_worker_device_properties,
        device_interface.caching_worker_current_devices,
    )
    return (
        attributes,
        [dict(table) for table in tables],
        id(triton.runtime.driver._active),
        torch._inductor.config.get_config_copy(),
        torch._functorch.config.get_config_copy(),
        torch._dynamo.config.get_config_copy(),
    )


def test_codegen_restores_the_state_of_torch(generated):
    generated("sm_90", False)  # whatever torch sets up once is set up
    before = _state()
    model, x = block()
    mxcompile.codegen(model, x, target="sm_80", training=False)
    assert _state() == before


def test_nothing_stays_changed_after_an_error():
    broken = Written(lambda _, x: x @ x.new_empty(7, 3))
    before = _state()
    with pytest.raises(mxcompile.errors.ModelError, match="cannot trace the model"):
        mxcompile.codegen(broken, torch.empty(4, 4), target="sm_90")
    assert _state() == before


def test_device_properties_of_stand_in_are_cleared_from_cache():
    here = torch.cuda.is_available()
    for target, expected in (("sm_100", ("cuda", 100, 148, 32)), ("gfx950", ("hip", "gfx950", 256, 64))):
        with stand_in(TARGETS[target]):
            seen = DeviceProperties.create(torch.device("cuda", 0))
        assert (seen.type, seen.cc, seen.multi_processor_count, seen.warp_size) == expected
    assert torch.cuda.is_available() is here
    assert DeviceProperties.create.__func__.cache_info().currsize == 0


def test_a_compile_for_this_machine_works_afterwards(generated):
    generated("sm_90", False)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    x = torch.randn(32, 64)
    compiled = torch.compile(layer, backend="inductor")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("target", ["cpu", "auto"])
def test_codegen_for_a_cpu_target_raises(target):
    with pytest.raises(mxcompile.errors.TargetError, match=r"code is generated for a GPU.*sm_100"):
        mxcompile.codegen(torch.nn.Linear(4, 4), torch.empty(2, 4), target=target)


def test_the_users_model_is_not_touched():
    model = torch.nn.Linear(64, 64)
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mxcompile.codegen(model, torch.empty(32, 64), target="sm_90")
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
