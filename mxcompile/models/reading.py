"""Lets Python code read values of fake tensors without operators: formatting, NumPy arrays, lists.

    f"expert_{index}"     the value of a scalar, as for a real tensor
    x.cpu().numpy()       an array; writes to the array do not reach the tensor
    x.tolist()            also for a functional tensor

These methods bypass the dispatcher: a fake tensor formats as ``FakeTensor(…)`` and has no array. Within
`values_read` the fakes of a `ValueTrackingMode` return tracked or assumed values, and functional tensors the
values of the wrapped fake. Fakes of other modes behave as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._mode_utils import no_dispatch

from mxcompile.models.value_tracking_mode import ValueTrackingMode


@contextmanager
def values_read() -> Iterator[None]:
    """Lets fakes of a `ValueTrackingMode` be formatted and converted to arrays and lists."""
    with mock.patch.multiple(FakeTensor, **_READERS), mock.patch.multiple(FunctionalTensor, **_READERS):
        yield


def _answering(tensor: Tensor) -> Any:
    """Returns the fake that `tensor` is or wraps, None unless its mode tracks values and Dynamo is idle."""
    if isinstance(tensor, FunctionalTensor):
        torch._functionalize_sync(tensor.elem)
        tensor = torch._from_functional_tensor(tensor.elem)
    if TracingContext.try_get() is not None or not isinstance(tensor, FakeTensor):
        return None
    return tensor if isinstance(tensor.fake_mode, ValueTrackingMode) else None


@_disable_dynamo
def _format(tensor: Tensor, spec: str) -> str:
    fake = _answering(tensor)
    if fake is None or fake.ndim:
        return object.__format__(tensor, spec)
    with no_dispatch():
        return format(fake.fake_mode.scalar(fake), spec)


@_disable_dynamo
def _numpy(tensor: Tensor, *, force: bool = False) -> Any:
    fake = _answering(tensor)
    if fake is None:
        return Tensor.numpy(tensor, force=force)
    with no_dispatch():
        return fake.fake_mode.values(fake).numpy(force=force)


@_disable_dynamo
def _tolist(tensor: Tensor) -> Any:
    fake = _answering(tensor)
    if fake is None:
        return _OWN_LIST[type(tensor)](tensor)
    with no_dispatch():
        return fake.fake_mode.values(fake).tolist()


_OWN_LIST: dict[type, Any] = {FakeTensor: FakeTensor.tolist, FunctionalTensor: FunctionalTensor.tolist}
_READERS: dict[str, Any] = {"__format__": _format, "numpy": _numpy, "tolist": _tolist}
