"""A fake-tensor copy of a model as one rank computes it: FSDP2 weights gathered, DTensors as local shards.

FSDP2 works between compiled graphs. The copy therefore has whole weights in the gather dtype. Tensor
parallelism works inside the graphs: its hooks and its DTensors stay, and the graphs contain this rank's
shards and collectives. Checkpoint wrappers stay too, because recomputation takes time and the discarded
activations do not count as saved memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.models.checkpointed import rewrapped
from mxcompile.models.fake_copy import fake_copy
from mxcompile.models.fakes import Faker
from mxcompile.models.value_tracking_mode import ValueTrackingMode
from mxcompile.models.wrappers import is_distributed, is_tensor_parallel
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.versions import newer


def rank_copy(groups: tuple[FSDPGroup, ...], model: nn.Module, mode: ValueTrackingMode) -> nn.Module:
    """Returns a copy of `model` as this rank runs it, with the weights of the FSDP2 `groups` gathered."""
    copied = fake_copy(model, mode, fake=_Shards(mode, groups), drops=_is_between_graphs)
    return rewrapped(copied, model)


def _is_between_graphs(hook: Any) -> bool:
    return is_distributed(hook) and not is_tensor_parallel(hook)


class _Shards(Faker):
    """Maps tensors to fakes with this rank's shapes: FSDP2 parameters gathered, DTensors as local shards."""

    def __init__(self, mode: ValueTrackingMode, groups: tuple[FSDPGroup, ...]) -> None:
        super().__init__(mode)
        self._assuming = mode
        self._gathered = {id(p.parameter): (p, group) for group in groups for p in group.parameters}

    def __call__(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if id(tensor) in self._gathered:
            gathered, group = self._gathered[id(tensor)]
            fake = self._shard(tensor, gathered.size, gathered.dtype, gathered.spec)
            if newer("torch", "2.14") and group.reduced is not None and fake.requires_grad:
                fake.grad_dtype = group.reduced  # torch 2.14 creates gradients in this dtype
            return fake
        if isinstance(tensor, DTensor):
            return self._shard(tensor, tensor.to_local().shape, tensor.dtype, tensor._spec)
        return super().__call__(tensor)

    def _shard(self, tensor: Tensor, size: torch.Size, dtype: torch.dtype, spec: Any) -> Tensor:
        """Returns a fake of `size`: the local tensor of a DTensor with layout `spec`, or plain without it."""
        from torch.distributed.tensor import DTensor

        with self._assuming.plain():
            with self._assuming:
                fake: Tensor = torch.empty(size, dtype=dtype, device="cpu")
            if spec is not None:
                fake = DTensor.from_local(
                    fake, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
                )
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
