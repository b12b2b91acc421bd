"""A head under sequence parallelism is not compiled alone, where Inductor's gradients are wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import gathered_head
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ways import front_door


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_such_a_head_is_left_and_named(alone: None, caplog: pytest.LogCaptureFixture):
    model = gathered_head.sharded(init_device_mesh("cpu", (1,)), sequence=True)
    with caplog.at_level(logging.WARNING, "mxcompile"):
        front_door(model)
    assert model.head._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    assert len(caplog.messages) == 1
    assert "head is not compiled" in caplog.messages[0]


def test_a_head_that_gathers_its_result_alone_is_compiled(alone: None, caplog: pytest.LogCaptureFixture):
    model = gathered_head.sharded(init_device_mesh("cpu", (1,)), sequence=False)
    front_door(model)
    assert model.head._compiled_call_impl is not None
    assert caplog.messages == []


@pytest.mark.slow
def test_gradients_of_such_a_head_are_right(tmp_path: Path):
    """They are those of the model that is not compiled. Inductor's of the head alone say why it is left."""
    subprocess.run([sys.executable, gathered_head.__file__, str(tmp_path)], check=True)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for sequence in (False, True):
            right = found["plain", sequence]
            for name, value in found["front_door", sequence].items():
                assert torch.allclose(value, right[name], rtol=1e-4, atol=1e-6), name
    wrong = found["head_alone", True]["head.weight"]
    assert not torch.allclose(wrong, found["plain", True]["head.weight"], rtol=1e-2), "compile it again"
