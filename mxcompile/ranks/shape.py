"""The mesh of a run by the names and sizes of its axes, and a process that stands for one rank of it.

PyTorch's fake process group has any number of ranks in one process and sends nothing. On it a user's
code (``init_device_mesh``, ``parallelize_module``, ``fully_shard``) does what it does on rank 0 of the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from mxcompile.errors import OptionError, shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"
"""The axis of pipeline stages."""

_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d+)")
_FORM = "axes with their sizes, such as dp=128,tp=8"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, the outermost first, as ``init_device_mesh`` takes them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> MeshShape:
        """The mesh that `text` describes: ``dp=128,tp=8``. Raises `OptionError` for anything else."""
        axes = (
            [_AXIS.fullmatch(word.strip()) for word in text.split(",")] if isinstance(text, str) else [None]
        )
        if None in axes:
            raise OptionError(f"mesh {shown(text)} does not have the form of {_FORM}")
        names = tuple(axis[1] for axis in axes if axis)
        sizes = tuple(int(axis[2]) for axis in axes if axis)
        if len(set(names)) < len(names):
            raise OptionError(f"mesh {shown(text)} names an axis twice")
        if 0 in sizes:
            raise OptionError(f"mesh {shown(text)} has an axis without ranks: a size is at least 1")
        return MeshShape(names=names, sizes=sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)


def pipeline_ranks(mesh: DeviceMesh) -> int:
    """How many ranks the axis of pipeline stages has, 1 without it."""
    return mesh[PIPELINE].size() if PIPELINE in (mesh.mesh_dim_names or ()) else 1


@contextmanager
def fake_ranks(shape: MeshShape) -> Iterator[DeviceMesh]:
    """Be rank 0 of a mesh of `shape` in here, on the CPU; what is sent arrives nowhere.

    Raises `OptionError` if this process has a process group, or a torch without distributed.
    """
    if not dist.is_available():
        raise OptionError("a mesh needs a torch that is built with torch.distributed")
    if dist.is_initialized():
        raise OptionError(
            "this process has a process group already, and a mesh is explained on a fake one: call"
            " torch.distributed.destroy_process_group() first, or explain in another process; in a factory"
            " leave out init_process_group, and take the mesh as its argument"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.ranks)
    try:
        yield init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
