"""Meshes by their words, and processes that stand for a rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxcompile.errors import OptionError
from mxcompile.ranks.shape import MeshShape, fake_ranks


def test_axes_are_read_in_order():
    shape = MeshShape.parse("dp=128, tp=8")
    assert shape == MeshShape(names=("dp", "tp"), sizes=(128, 8))
    assert shape.ranks == 1024
    assert MeshShape.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ": expected axes with their sizes"),
        ("dp", ": expected axes with their sizes"),
        ("dp=8;tp=2", ": expected axes with their sizes"),
        ("dp=-1", ": expected axes with their sizes"),
        ("dp=two", ": expected axes with their sizes"),
        ("dp=2,dp=4", "names an axis twice"),
        ("dp=0", "has an axis of size 0"),
    ],
)
def test_invalid_mesh_shapes_raise(text: str, fault: str):
    with pytest.raises(OptionError, match=fault):
        MeshShape.parse(text)


def test_a_process_is_rank_0_of_any_mesh():
    with fake_ranks(MeshShape.parse("pp=16,dp=32,tp=8")) as mesh:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4096)
        assert (mesh.mesh_dim_names, mesh["tp"].size()) == (("pp", "dp", "tp"), 8)
    assert not dist.is_initialized()


def test_the_group_goes_when_an_error_comes():
    with pytest.raises(KeyError), fake_ranks(MeshShape.parse("dp=2")):
        raise KeyError
    assert not dist.is_initialized()


def test_a_group_that_is_there_is_left_alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with (
            pytest.raises(OptionError, match="has a process group already"),
            fake_ranks(MeshShape.parse("dp=4")),
        ):
            pass
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()
