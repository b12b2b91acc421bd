"""The axes and sizes of a device mesh, and a fake process group that stands for one rank of it.

PyTorch's fake process group has any number of ranks in one process and sends nothing. User code
(``init_device_mesh``, ``parallelize_module``, ``fully_shard``) runs on it as on rank 0 of the real run.
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
"""Mesh axis of the pipeline stages."""

_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d+)")
_FORM = "axes with their sizes, such as dp=128,tp=8"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Names and sizes of mesh axes, outermost first, in the order of ``init_device_mesh``."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> MeshShape:
        """Returns the mesh shape of a text such as ``dp=128,tp=8``. Raises `OptionError` for another form."""
        axes = (
            [_AXIS.fullmatch(word.strip()) for word in text.split(",")] if isinstance(text, str) else [None]
        )
        if None in axes:
            raise OptionError(f"cannot read mesh {shown(text)}: expected {_FORM}")
        names = tuple(axis[1] for axis in axes if axis)
        sizes = tuple(int(axis[2]) for axis in axes if axis)
        if len(set(names)) < len(names):
            raise OptionError(f"mesh {shown(text)} names an axis twice: give each axis one size")
        if 0 in sizes:
            raise OptionError(f"mesh {shown(text)} has an axis of size 0: a size must be at least 1")
        return MeshShape(names=names, sizes=sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes)


def pipeline_ranks(mesh: DeviceMesh) -> int:
    """Returns the size of the pipeline axis, 1 without a pipeline axis."""
    return mesh[PIPELINE].size() if PIPELINE in (mesh.mesh_dim_names or ()) else 1


@contextmanager
def fake_ranks(shape: MeshShape) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of a CPU mesh of `shape` without communication, and yields the mesh.

    Raises `OptionError` if this process already has a process group, or if torch lacks torch.distributed.
    """
    if not dist.is_available():
        raise OptionError(
            "a mesh needs torch.distributed, which this build of torch lacks: install another build"
        )
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
