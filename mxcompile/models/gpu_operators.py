"""Runs GPU-only operators on the fake CPU tensors that stand for CUDA tensors.

`torch.histc` of integers, which torchtitan uses to count the tokens of each expert, has no CPU kernel. Dynamo
captures the Triton kernels of a model's own code as on a GPU; launched outside of Dynamo on fakes they do
nothing. ``torch.autocast("cuda")`` acts on the fakes: PyTorch turns it off on a machine without a GPU.
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
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _triton

_HISTC = torch.ops.aten.histc.default


@contextmanager
def gpu_operators() -> Iterator[None]:
    """Patches torch and Triton so that fake CPU tensors support these operators."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(fake_impls.op_implementations_dict, {_HISTC: _histc}))
        if _triton.has_triton_package():
            _launch_nothing(patches)
        yield


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


def _histc(_: Any, __: Any, x: Tensor, bins: int = 100, *limits: Any, **named: Any) -> Tensor:
    return x.new_empty(named.get("bins", bins))


def _launch_nothing(patches: ExitStack) -> None:
    """Makes Triton kernels do nothing on fakes until `patches` end, with a stand-in GPU driver."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.runtime.JITFunction
    patches.enter_context(mock.patch.object(kernel, "run", _unless_fake(kernel.run)))
    has_triton: Any = _triton.has_triton
    if not has_triton():
        has_triton.cache_clear()  # the cached answer may come from another stand-in GPU
        target = GPUTarget("cuda", 90, 32)
        driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
        patches.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        patches.enter_context(mock.patch.object(_triton, "has_triton", return_value=True))


def _unless_fake(run: Any) -> Any:
    @_disable_dynamo
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        is_fake = any(isinstance(value, FakeTensor | FunctionalTensor) for value in arguments)
        return None if is_fake else run(kernel, *args, **kwargs)

    return launch
