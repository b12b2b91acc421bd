"""Patches of torch and Triton for models that run on fake CPU tensors, which may stand for CUDA tensors.

    torch.histc of integers    torchtitan counts the tokens of each expert with it; it has no CPU kernel
    Triton kernels             outside of Dynamo they do nothing on fakes; Dynamo captures them as on a GPU
    torch.autocast("cuda")     acts on the fakes: PyTorch turns it off on a machine without a GPU
    f"expert_{index}"          the value of a scalar, as for a real tensor
    x.cpu().numpy()            an array; writes to the array do not reach the tensor
    x.tolist()                 also for a functional tensor

The last three bypass the dispatcher: a fake tensor formats as ``FakeTensor(…)`` and has no array. Within
`patched` the fakes of a `ValueTrackingMode` return tracked or assumed values, and functional tensors the
values of the wrapped fake. Fakes of other modes behave as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _triton
from torch.utils._mode_utils import no_dispatch

from mxcompile.models.value_tracking_mode import ValueTrackingMode

_HISTC = torch.ops.aten.histc.default


@contextmanager
def patched() -> Iterator[None]:
    """Lets fake CPU tensors support these operators, and be formatted and converted to arrays and lists."""

    def histc(_: Any, __: Any, x: Tensor, bins: int = 100, *limits: Any, **named: Any) -> Tensor:
        return x.new_empty(named.get("bins", bins))

    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(fake_impls.op_implementations_dict, {_HISTC: histc}))
        for kind in (FakeTensor, FunctionalTensor):
            patches.enter_context(mock.patch.multiple(kind, **_READERS))
        if _triton.has_triton_package():
            from triton.backends.compiler import GPUTarget
            from triton.runtime import JITFunction, driver

            patches.enter_context(mock.patch.object(JITFunction, "run", _unless_fake(JITFunction.run)))
            has_triton: Any = _triton.has_triton
            if not has_triton():
                has_triton.cache_clear()  # the cached answer may come from another stand-in GPU
                target = GPUTarget("cuda", 90, 32)
                gpu = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
                patches.enter_context(mock.patch.object(driver, "_active", gpu))
                patches.enter_context(mock.patch.object(_triton, "has_triton", return_value=True))
        yield


def _unless_fake(run: Any) -> Any:
    """Returns a method that runs a Triton kernel by `run`, and does nothing on fakes."""

    @_disable_dynamo
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        is_fake = any(isinstance(value, FakeTensor | FunctionalTensor) for value in arguments)
        return None if is_fake else run(kernel, *args, **kwargs)

    return launch


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """Makes CUDA autocast act on fake CPU tensors, also an autocast that is active at entry."""
    create = torch.autocast.__init__

    @functools.wraps(create)  # Dynamo reads the signature
    def on_cpu(self: Any, device_type: str, dtype: Any = None, *options: Any, **named: Any) -> None:
        current = "cpu" if torch.is_autocast_enabled("cpu") else device_type
        create(self, "cpu", dtype or torch.get_autocast_dtype(current), *options, **named)

    around = torch.is_autocast_enabled("cuda")
    with (
        mock.patch.object(torch.autocast, "__init__", on_cpu),
        torch.autocast("cuda") if around else nullcontext(),
    ):
        yield


def unwrapped_functional(value: Tensor) -> Tensor:
    """Returns the tensor inside a functional tensor, after pending mutations; other tensors as they are."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._functionalize_sync(value.elem)
    inner: Tensor = torch._from_functional_tensor(value.elem)
    return inner


def _answering(tensor: Tensor) -> Any:
    """Returns the fake that `tensor` is or wraps, None unless its mode tracks values and Dynamo is idle."""
    tensor = unwrapped_functional(tensor)
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
    if (fake := _answering(tensor)) is None:
        return Tensor.numpy(tensor, force=force)
    with no_dispatch():
        return fake.fake_mode.values(fake).numpy(force=force)


@_disable_dynamo
def _tolist(tensor: Tensor) -> Any:
    if (fake := _answering(tensor)) is None:
        return _OWN_LIST[type(tensor)](tensor)
    with no_dispatch():
        return fake.fake_mode.values(fake).tolist()


_OWN_LIST: dict[type, Any] = {FakeTensor: FakeTensor.tolist, FunctionalTensor: FunctionalTensor.tolist}
_READERS: dict[str, Any] = {"__format__": _format, "numpy": _numpy, "tolist": _tolist}
