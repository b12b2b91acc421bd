"""Partial gradients: each tensor-parallel rank has one summand, e.g. for a norm over the rank's own tokens.

Backward leaves these gradients partial. FSDP2 reduces them one by one before its own reduction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mxcompile.distributed.tensors import local_bytes
from mxcompile.mesh.collectives import Axes, Collective, stride
from mxcompile.models.names import user_path


def backward(output: Any) -> None:
    """Runs backward from all differentiable tensors in `output`, which are fake."""
    if results := _differentiable(output):
        torch.autograd.backward([value.sum() for value in results])


def result_bytes(output: Any) -> int:
    """Returns the bytes of this rank's part of the differentiable tensors in `output`."""
    return sum(map(local_bytes, _differentiable(output)))


def _differentiable(output: Any) -> list[Tensor]:
    return [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad]


def partial_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, parameter) for each parameter of `model` whose gradient is partial."""
    for path, parameter in model.named_parameters():
        placements = getattr(parameter.grad, "placements", ())
        if any(placement.is_partial() for placement in placements):
            yield user_path(path), parameter


def of_partial_gradients(model: nn.Module, axes: Axes) -> Iterator[Collective]:
    """Yields the collectives that reduce the partial gradients of `model`."""
    for path, parameter in partial_parameters(model):
        gradient = parameter.grad.to_local()
        num_bytes = gradient.numel() * gradient.element_size()
        for axis, placement in enumerate(parameter.grad.placements):
            if placement.is_partial():
                group = parameter.grad.device_mesh.get_group(axis)
                yield Collective(
                    kind="all-reduce" if parameter.placements[axis].is_replicate() else "reduce-scatter",
                    what="gradients",
                    name=path,
                    dtype=str(gradient.dtype).removeprefix("torch."),
                    num_bytes=num_bytes,
                    without_bytes=num_bytes,
                    axis=axes(group),
                    ranks=group.size(),
                    stride=stride(group),
                    phase="backward",
                )
