"""Collectives that shard a tensor send the qdata and scale bytes of an `MXTensor` instead of its values.

DTensor splits a tensor (see `operators`) and sends its shards, or the whole tensor, from one rank to the
others. A shard that cuts scale blocks was dequantized by the split and is sent as values.
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
    """Copies the tensors of one rank to all other ranks."""
    return tensors, _send_parts(tensors, lambda index: func(_parts(tensors, index), *args, **kwargs))


def _scatter(
    func: Any, outputs: Sequence[MXTensor], inputs: Sequence[Sequence[MXTensor]], *args: Any, **kwargs: Any
) -> Any:
    """Sends each rank its own tensor among the `inputs` of one rank."""

    def send(index: int) -> Any:
        return func(_parts(outputs, index), [_parts(row, index) for row in inputs], *args, **kwargs)

    return outputs, _send_parts(outputs, send)


def _send_parts(tensors: Sequence[Any], send: Callable[[int], Any]) -> Any:
    """Calls `send` with the index of each part in sequence. Returns the work handle of the last part."""
    last = max((len(tensor.parts) for tensor in tensors if isinstance(tensor, MXTensor)), default=2) - 1
    for index in range(last):
        send(index)[1].wait()
    return send(last)[1]


def _parts(tensors: Sequence[Any], index: int) -> list[Tensor]:
    """Returns part number `index` of each tensor, FP8 as bytes."""
    if not all(isinstance(tensor, MXTensor) for tensor in tensors):
        raise FormatError(
            "a collective got tensors in MXFP8 together with others: send them in separate collectives"
        )
    parts = [tensor.parts[index] for tensor in tensors]
    return [part if part.dtype is torch.float32 else part.view(torch.uint8) for part in parts]


if distributed.is_available():
    handles(torch.ops.c10d.broadcast_.default)(_broadcast)
    handles(torch.ops.c10d.scatter_.default)(_scatter)
