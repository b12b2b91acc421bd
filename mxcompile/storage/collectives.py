"""The collectives that shard a tensor send codes and scale bytes of an `MXTensor`, not its values.

DTensor splits a tensor (see `operators`) and sends the parts, or the whole tensor, from one rank to the
others. A part that cuts blocks is a tensor of values by then, and is sent as such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mxcompile.errors import FormatError
from mxcompile.storage.handlers import handles
from mxcompile.storage.tensor import MXTensor

Part = Callable[[Any], Tensor]


def _broadcast(func: Any, tensors: Sequence[MXTensor], *args: Any, **kwargs: Any) -> Any:
    """Copies the tensors of one rank into the tensors of all others."""
    return tensors, _each(tensors, lambda part: func(_parts(tensors, part), *args, **kwargs))


def _scatter(
    func: Any,
    outputs: Sequence[MXTensor],
    inputs: Sequence[Sequence[MXTensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Copies each of several tensors of one rank into the tensor of another rank."""

    def send(part: Part) -> Any:
        return func(_parts(outputs, part), [_parts(row, part) for row in inputs], *args, **kwargs)

    return outputs, _each(outputs, send)


def _each(tensors: Sequence[MXTensor], send: Callable[[Part], Any]) -> Any:
    """Runs `send` for each part of `tensors`, one after the other. Returns the work of the last part."""
    last = max((len(tensor.parts) for tensor in tensors if isinstance(tensor, MXTensor)), default=2) - 1
    for place in range(last):
        _, work = send(functools.partial(_part, place=place))
        work.wait()
    _, work = send(functools.partial(_part, place=last))
    return work


def _parts(tensors: Sequence[Any], part: Part) -> list[Tensor]:
    if all(isinstance(tensor, MXTensor) for tensor in tensors):
        return [part(tensor) for tensor in tensors]
    raise FormatError("tensors in MXFP8 and others cannot be sent together")


def _part(x: MXTensor, place: int) -> Tensor:
    """Returns a part of `x`, FP8 as bytes."""
    part = x.parts[place]
    return part if part.dtype is torch.float32 else part.view(torch.uint8)


if distributed.is_available():
    handles(torch.ops.c10d.broadcast_.default)(_broadcast)
    handles(torch.ops.c10d.scatter_.default)(_scatter)
