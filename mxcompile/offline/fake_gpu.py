"""Fake GPU tensors that work on machines without a GPU, inside a context.

Some Python operators of torch, ``~x``, ``x[…]`` and ``x.copy_``, enter the device of `x` before they
dispatch, which fails without a GPU. The replacements dispatch directly or compute the shape on the meta
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only


def _invert(x: FakeTensor) -> Tensor:
    return torch.bitwise_not(x)


def _getitem(x: FakeTensor, index: Any) -> Any:
    if x.device.type != "cuda":
        return Tensor.__getitem__(x, index)
    with no_dispatch():
        element = _meta(x)[tree_map_only(Tensor, _meta, index)]
    with x.fake_mode:
        return torch.empty_strided(element.shape, element.stride(), dtype=x.dtype, device=x.device)


def _copy(x: FakeTensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if x.device.type != "cuda":
        return Tensor.copy_(x, source, non_blocking)
    source.expand(x.shape)  # raises if the shape does not fit
    return x


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@contextmanager
def operators_of_fake_gpu_tensors() -> Iterator[None]:
    """Patches these operators for fake GPU tensors."""
    with (
        mock.patch.object(FakeTensor, "__invert__", _invert, create=True),
        mock.patch.object(FakeTensor, "__getitem__", _getitem, create=True),
        mock.patch.object(FakeTensor, "copy_", _copy, create=True),
    ):
        yield
