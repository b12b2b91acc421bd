"""The bytes that one rank of a mesh holds in a training step.

    parameters   this rank's shards, and buffers
    gradients    of what is trained, in the same shards and dtypes
    optimizer    two values for each trained one, in its dtype, as AdamW keeps them
    gathered     weights of the groups that FSDP2 holds whole at once: those that it does not free, and of the
                 others the two largest, one in use and one on its way; the gradients of the largest group,
                 as backward makes them and as they are reduced
    saved        what forward keeps for backward, MX copies among it
    logits       the result of the head

Not in it: what operators need for themselves, what the allocator keeps, and buffers of the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.mesh.fsdp import FSDPGroup
from mxcompile.policy import Gemm, Role
from mxcompile.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a rank holds, by what they are for; see this module's text."""

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    saved: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """The sum, which is not less than the peak of what it is a sum of."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.saved + self.logits


def memory(model: nn.Module, groups: Iterable[FSDPGroup], report: Report, *, training: bool) -> Memory:
    """The memory of a rank that holds `model`, of which FSDP2 shards `groups`, and compiles `report`."""
    trained = sum(map(_bytes, (p for p in model.parameters() if p.requires_grad))) if training else 0
    return Memory(
        parameters=sum(map(_bytes, (*model.parameters(), *model.buffers()))),
        gradients=trained,
        optimizer=2 * trained,
        gathered=_gathered(tuple(groups), training=training),
        saved=report.summary.saved_bytes or 0,
        logits=max(
            (g.batch * g.m * g.n * _itemsize(g.dtype) for g in report.gemms if _is_head(g)), default=0
        ),
    )


def _gathered(groups: tuple[FSDPGroup, ...], *, training: bool) -> int:
    freed = sorted((_weights(group) for group in groups if group.again is not None), reverse=True)
    kept = sum(_weights(group) for group in groups if group.again is None)
    gradients = max((_gradients(group) for group in groups), default=0) if training else 0
    return kept + sum(freed[:2]) + gradients


def _weights(group: FSDPGroup) -> int:
    """Bytes of the whole weights of `group`."""
    return group.ranks * sum(one.travels for one in group.parameters)


def _gradients(group: FSDPGroup) -> int:
    """Bytes of the gradients of `group`, as backward makes them and as they are reduced."""
    trained = [one for one in group.parameters if one.parameter.requires_grad]
    reduced = 0 if group.reduced is None else group.reduced.itemsize
    return group.ranks * sum(one.numel * (one.dtype.itemsize + reduced) for one in trained)


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of the part of `tensor` that this rank holds."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize) if dtype else 2


def _is_head(gemm: Any) -> bool:
    return bool(gemm.role == Role.HEAD and gemm.gemm == Gemm.FPROP)
