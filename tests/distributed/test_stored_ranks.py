"""A model whose weights are stored in MXFP8 and then sharded gives the results of the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import stored_ranks
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mxcompile
from mxcompile.errors import FormatError


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", [{}, stored_ranks.NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_codes_and_scales_are_sent(alone: None, placement: Shard | Replicate, how: dict):
    weight = mxcompile.quantize(torch.randn(48, 64), **how)
    part = distribute_tensor(weight, init_device_mesh("cpu", (1,)), [placement]).to_local()
    assert isinstance(part, mxcompile.MXTensor)
    assert torch.equal(part.qdata.view(torch.uint8), weight.qdata.view(torch.uint8))
    assert torch.equal(part.scale_bytes, weight.scale_bytes)
    assert torch.equal(part.dequantize(), weight.dequantize())


def test_a_broadcast_gives_every_rank_the_values_whatever_it_holds(tmp_path: Path):
    """Codes went to a buffer of values, which then held garbage, and the scales to the next collective."""
    for results in on_ranks(stored_ranks.RANKS, tmp_path, stored_ranks.received_by_precision):
        for precision, received in results.items():
            right = stored_ranks.weight(0, precision).dequantize(torch.float32)
            for name, values in received.items():
                assert torch.equal(values, right), (precision, name)


def test_a_broadcast_keeps_the_codes_of_equal_values(alone: None):
    weight = mxcompile.quantize(torch.full((32, 64), 448.0)).t()
    weight.qdata[0, 0] = float("nan")
    before = [part.clone() for part in weight.parts]
    dist.broadcast(weight, src=0)
    for part, old in zip(weight.parts, before, strict=True):
        assert torch.equal(part.view(torch.uint8), old.view(torch.uint8))


def test_a_scatter_of_two_kinds_is_refused(alone: None):
    weight = mxcompile.quantize(torch.randn(32, 32))
    with pytest.raises(FormatError, match="MXTensors together with others"):
        dist.scatter(weight, [weight.dequantize(torch.float32)])


def test_collectives_that_would_lose_their_result_are_refused(alone: None):
    weight = mxcompile.quantize(torch.randn(32, 32))
    with pytest.raises(FormatError, match=r"allreduce_.* takes no MXTensor"):
        dist.all_reduce(weight)


def test_writes_into_one_of_a_list_are_refused():
    weight = mxcompile.quantize(torch.randn(32, 32))
    with pytest.raises(FormatError, match="in place"):
        torch._foreach_mul_([torch.ones(2), weight], 2.0)


@pytest.mark.slow
def test_a_sharded_model_is_the_whole_one(tmp_path: Path):
    """In FP32 sums of another order, and of other blocks where a part cuts them, which then holds values."""
    for rank, outputs in enumerate(on_ranks(stored_ranks.RANKS, tmp_path, stored_ranks.outputs)):
        for hidden, result in outputs.items():
            cut = hidden // stored_ranks.RANKS % 32 > 0
            kinds = {"gate": "MXTensor", "up": "MXTensor", "down": "Tensor" if cut else "MXTensor"}
            assert {name: result["kinds"][f"{name}.weight"] for name in kinds} == kinds
            assert result["stored"] == dict.fromkeys(stored_ranks.POLICIES, 2 if cut else 3)
            with torch.no_grad():
                right = stored_ranks.stored(hidden, seed=0)(stored_ranks.tokens()).float()
            for name, output in result["outputs"].items():
                error = (output.float() - right).norm() / right.norm()
                assert error < (0.05 if name == "inference" else 0.01), (rank, hidden, name, error)
