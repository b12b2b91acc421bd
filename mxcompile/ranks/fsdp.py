"""The FSDP2 parameter groups of a model: the parameters that are gathered and reduced together.

    forward    a group is gathered, unless one rank has the whole of it
    backward   a group that backward reaches is gathered again if it was freed after forward, and so is the
               group before it, which FSDP2 prefetches; gradients are reduce-scattered
               with a second axis (HSDP) the scattered gradients are all-reduced along that axis

FSDP2 does not free the root's group after forward, unless the user requests it. A parameter with tensor
parallelism is a shard already when FSDP2 shards it. FSDP2's state is private: `groups` raises `ModelError`
for a torch version with another layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mxcompile.distributed.tensors import local
from mxcompile.errors import ModelError
from mxcompile.formats import num_blocks
from mxcompile.models.fsdp import states
from mxcompile.models.names import user_path, within
from mxcompile.versions import newer

_SPECS = ("_unsharded_dtensor_spec", "_tp_spec")
"""Attributes of FSDP2 parameters for the layout after the gather, in torch from 2.13 on and before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A parameter that FSDP2 shards.

    path: path in the model. parameter: the shard that the model holds. size: size on this rank after the
    gather. spec: DTensor layout after the gather, or None for a plain tensor. dtype: dtype after the gather.
    numel: elements of the padded shard. travels: bytes that this rank sends to a gather.
    """

    path: str
    parameter: nn.Parameter
    size: torch.Size
    spec: Any
    dtype: torch.dtype
    numel: int
    travels: int

    @property
    def is_mx(self) -> bool:
        """Whether the gather sends MXFP8 qdata and scales."""
        return self.travels != self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPGroup:
    """Parameters that one collective gathers.

    path: path of the module with the group. shards, replicates: process groups of the shard axis and of the
    replicate axis, or None without that axis. backward: process group of a gather in backward, or None if
    the weights stay gathered after forward. reduced: dtype of the gradient reduction, or None if nothing is
    trained.
    """

    path: str
    parameters: tuple[Sharded, ...]
    shards: Any
    replicates: Any
    backward: Any
    reduced: torch.dtype | None

    @property
    def ranks(self) -> int:
        """Number of ranks that the parameters are sharded over."""
        return 1 if self.shards is None else int(self.shards.size())

    def is_reached(self, paths: Collection[str]) -> bool:
        """Whether `paths` has a module within the group's module, or one of the group's parameters."""
        parameters = {parameter.path for parameter in self.parameters}
        return any(path in parameters or within(path, self.path) for path in paths)


def groups(model: nn.Module) -> tuple[FSDPGroup, ...]:
    """Returns the FSDP2 groups of `model` in module order. Raises `ModelError` for an unknown FSDP2 state."""
    try:
        return tuple(_groups(model))
    except AttributeError as error:
        raise ModelError(f"cannot read the shards of FSDP2 in torch {torch.__version__}: {error}") from error


def prefetched(groups: Sequence[FSDPGroup], reached: Collection[str]) -> dict[str, str]:
    """Returns the path of the frozen group that FSDP2 prefetches in a group's backward, by the group's path.

    During the backward of a group, FSDP2 gathers the group whose forward ended before it. It does so even if
    backward never reaches that group. groups: in module order, which is taken for the order of forward.
    reached: paths of the groups that backward reaches.
    """
    ended: list[str] = []
    running: list[str] = []
    for path in dict.fromkeys(group.path for group in groups):
        while running and not within(path, running[-1]):
            ended.append(running.pop())
        running.append(path)
    ended += reversed(running)
    return {late: early for early, late in pairwise(ended) if late in reached and early not in reached}


def _groups(model: nn.Module) -> Iterator[FSDPGroup]:
    roots: set[str] = set()
    for path, state, members in states(model):
        is_root = not any(within(path, root) for root in roots)
        roots |= {path} if is_root else set()
        freed = not (is_root and state._auto_reshard_after_forward)
        for group, entries in members:
            parameters = tuple(_sharded(name, entry) for name, entry in entries)
            reduced = None
            if trained := [entry for entry in parameters if entry.parameter.requires_grad]:
                # by default the dtype of the gather; from torch 2.14 on, of the parameter
                usual = trained[0].parameter.dtype if newer("torch", "2.14") else trained[0].dtype
                reduced = state._mp_policy.reduce_dtype or usual
            mesh, resharded_to = group.mesh_info, group.post_forward_mesh_info if freed else None
            yield FSDPGroup(
                path=user_path(path),
                parameters=parameters,
                shards=getattr(mesh, "shard_process_group", None),
                replicates=getattr(mesh, "replicate_process_group", None),
                backward=None if resharded_to is None else resharded_to.shard_process_group,
                reduced=reduced,
            )


def _sharded(path: str, parameter: Any) -> Sharded:
    shard, padded = parameter.sharded_param, parameter.padded_sharded_param_size
    dtype = (parameter.mp_policy.param_dtype if shard.dtype.is_floating_point else None) or shard.dtype
    travels = padded.numel() * dtype.itemsize
    if hasattr(local(shard), "fsdp_pre_all_gather"):  # MXFP8 sends qdata and one scale byte per 32×32 tile
        travels = padded.numel() + padded[:-2].numel() * num_blocks(padded[-2]) * num_blocks(padded[-1])
    return Sharded(
        path=path,
        parameter=shard,
        size=parameter._orig_size,
        spec=next((spec for name in _SPECS if (spec := getattr(parameter, name, None)) is not None), None),
        dtype=dtype,
        numel=padded.numel(),
        travels=travels,
    )
