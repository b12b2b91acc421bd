"""The collectives that shard a tensor send codes and scale bytes of an `MXTensor`, not its values.

DTensor splits a tensor (see `operators`) and sends the parts, or the whole tensor, from one rank to the
others. A part that cuts blocks is a tensor of values by then, and is sent as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mxcompile.errors import FormatError
from mxcompile.storage.operators import handles
from mxcompile.storage.tensor import MXTensor


def _broadcast(func: Any, tensors: Sequence[MXTensor], *args: Any, **kwargs: Any) -> Any:
    """Copies the tensors of one rank into the tensors of all others."""
    return tensors, _each(tensors, lambda place: func(_parts(tensors, place), *args, **kwargs))


def _scatter(
    func: Any,
    outputs: Sequence[MXTensor],
    inputs: Sequence[Sequence[MXTensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Copies each of several tensors of one rank into the tensor of another rank."""

    def send(place: int) -> Any:
        return func(_parts(outputs, place), [_parts(row, place) for row in inputs], *args, **kwargs)

    return outputs, _each(outputs, send)


def _each(tensors: Sequence[Any], send: Callable[[int], Any]) -> Any:
    """Calls `send` with the place of each part, one after the other. Returns the work of the last part."""
    last = max((len(tensor.parts) for tensor in tensors if isinstance(tensor, MXTensor)), default=2) - 1
    for place in range(last):
        send(place)[1].wait()
    return send(last)[1]


def _parts(tensors: Sequence[Any], place: int) -> list[Tensor]:
    """Returns the parts of `tensors` at `place`, FP8 as bytes."""
    if not all(isinstance(tensor, MXTensor) for tensor in tensors):
        raise FormatError("tensors in MXFP8 and others cannot be sent together")
    parts = [tensor.parts[place] for tensor in tensors]
    return [part if part.dtype is torch.float32 else part.view(torch.uint8) for part in parts]


if distributed.is_available():
    handles(torch.ops.c10d.broadcast_.default)(_broadcast)
    handles(torch.ops.c10d.scatter_.default)(_scatter)
