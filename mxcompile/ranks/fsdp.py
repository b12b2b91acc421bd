"""The parameters of a model as FSDP2 holds them: groups that are gathered and reduced together.

    forward    a group is gathered, unless one rank has all of it
    backward   gathered again if it was freed after forward; gradients reduced and scattered
               with a second axis (HSDP) the scattered gradients are reduced along that

The root's group is not freed after forward unless the user asks for it, as FSDP2 decides at the first call.
A parameter of several tensor-parallel ranks is a shard before FSDP2 shards it. FSDP2's own state is not
public: with a torch that keeps it otherwise `groups` raises `ModelError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.errors import ModelError
from mxcompile.formats import num_blocks
from mxcompile.models.fsdp_state import states
from mxcompile.models.names import user_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A parameter that FSDP2 shards.

    path: in the model. parameter: the shard that the model holds. size: on this rank when gathered. spec: its
    layout as a DTensor when gathered, None for a plain tensor. dtype: when gathered. numel: elements of the
    shard, padded. travels: bytes that this rank gives to a gather.
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
        """Whether it is gathered as codes and scales."""
        return self.travels != self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDPGroup:
    """Parameters that are gathered together.

    path: of the module that holds them. shards, replicates: process groups along which they are sharded and
    replicated, None for one that is not there. again: that of the gather in backward, None if they are not
    freed after forward. reduced: dtype in which gradients travel, None if nothing is trained. inputs,
    outputs: dtypes that the module's floating-point inputs and outputs are cast to, None for as they are.
    """

    path: str
    parameters: tuple[Sharded, ...]
    shards: Any
    replicates: Any
    again: Any
    reduced: torch.dtype | None
    inputs: torch.dtype | None
    outputs: torch.dtype | None

    @property
    def ranks(self) -> int:
        """How many ranks share the parameters."""
        return 1 if self.shards is None else int(self.shards.size())


def groups(model: nn.Module) -> tuple[FSDPGroup, ...]:
    """The groups of `model`, in the order of its modules. Raises `ModelError` for an unknown torch."""
    try:
        return tuple(_groups(model))
    except AttributeError as error:
        raise ModelError(f"cannot tell what FSDP2 of torch {torch.__version__} shards: {error}") from error


def _groups(model: nn.Module) -> Iterator[FSDPGroup]:
    roots: set[str] = set()
    for path, state, own in states(model):
        is_root = not any(path.startswith(f"{root}.") or not root for root in roots)
        roots |= {path} if is_root else set()
        freed = not (is_root and state._auto_reshard_after_forward)
        yield from (_group(user_path(path), group, held, freed=freed) for group, held in own)


def _group(path: str, group: Any, held: list[tuple[str, Any]], *, freed: bool) -> FSDPGroup:
    mesh, again = group.mesh_info, group.post_forward_mesh_info if freed else None
    mixed = group.mp_policy
    parameters = tuple(_sharded(place, parameter) for place, parameter in held)
    trained = [one for one in parameters if one.parameter.requires_grad]
    return FSDPGroup(
        path=path,
        parameters=parameters,
        shards=getattr(mesh, "shard_process_group", None),
        replicates=getattr(mesh, "replicate_process_group", None),
        again=None if again is None else again.shard_process_group,
        reduced=(mixed.reduce_dtype or trained[0].dtype) if trained else None,
        inputs=mixed.param_dtype if mixed.cast_forward_inputs else None,
        outputs=mixed.output_dtype,
    )


def _sharded(path: str, parameter: Any) -> Sharded:
    held = parameter.sharded_param
    dtype = parameter.mp_policy.param_dtype if held.dtype.is_floating_point else None
    numel = parameter.padded_sharded_param_size.numel()
    dtype = dtype or held.dtype
    return Sharded(
        path=path,
        parameter=held,
        size=parameter._orig_size,
        spec=parameter._unsharded_dtensor_spec,
        dtype=dtype,
        numel=numel,
        travels=_travels(held, parameter.padded_sharded_param_size, dtype),
    )


def _travels(held: Tensor, shard: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of a shard when it is gathered: codes and a scale for a tile, where it is gathered in MXFP8."""
    cast = getattr(getattr(held, "_local_tensor", held), "fsdp_pre_all_gather", None)
    if cast is None:
        return shard.numel() * dtype.itemsize
    return shard.numel() + shard[:-2].numel() * num_blocks(shard[-2]) * num_blocks(shard[-1])
