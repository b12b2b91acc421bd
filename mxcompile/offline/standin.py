"""A context in which torch and Triton see the GPU of a target on any machine.

Patched inside the context, and restored at its end, also after errors:

    torch.cuda, torch.version          availability, properties, current device, random state
    Dynamo's device interfaces         the same, for Inductor
    Triton's active driver             the target of compiled kernels
    Inductor's caches                  cached capabilities of the chip, cleared at entry and exit

Nothing is allocated on or sent to a device, so a real GPU is not disturbed. A lock serializes compiles,
because other threads would see the patches, too.

Some Python operators of torch, ``~x``, ``x[…]`` and ``x.copy_``, enter the device of `x` before they
dispatch, which fails without a GPU. Their replacements dispatch directly or compute the shape on the meta
device.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _triton
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget

from mxcompile.lowering.targets import Target

DEVICE = torch.device("cuda", 0)
"""Device of the stand-in."""

_LOCK = threading.RLock()

_REMEMBERING = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.choices",
    "torch._inductor.compile_fx",
    "torch._inductor.select_algorithm",
    "torch._inductor.kernel.mm",
    "torch._inductor.runtime.hints",
    "torch._inductor.codegen.triton",
    "torch._inductor.codegen.cuda.cuda_env",
)
"""Modules with functions that cache capabilities of the machine."""

_HAS_TRITON: Any = _triton.has_triton
"""The original function, whose cache is cleared; `torch.utils._triton` may hold a replacement."""

_HIP, _CUDA = "7.0.0", "13.0"


def triton_target(target: Target) -> GPUTarget:
    """Returns Triton's description of the chip."""
    return GPUTarget("hip" if _is_amd(target) else "cuda", target.arch, target.warp_size)


def _is_amd(target: Target) -> bool:
    return isinstance(target.arch, str)


def _capability(target: Target) -> tuple[int, int]:
    """Returns major and minor version; 9.4 or 9.5 for AMD's gfx9 family."""
    if isinstance(target.arch, int):
        return divmod(target.arch, 10)
    return 9, int(target.name.removeprefix("gfx9")[0])


def _properties(target: Target) -> SimpleNamespace:
    """Returns the chip's properties as ``torch.cuda.get_device_properties`` does."""
    major, minor = _capability(target)
    return SimpleNamespace(
        name=target.peak.chip if target.peak else target.name,
        major=major,
        minor=minor,
        gcnArchName=target.name if _is_amd(target) else "",
        multi_processor_count=target.processors,
        warp_size=target.warp_size,
        regs_per_multiprocessor=target.registers,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        total_memory=int(target.peak.memory_gb * 1e9) if target.peak else 32 << 30,
        L2_cache_size=32 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=target.shared_bytes,
        shared_memory_per_multiprocessor=target.shared_bytes + 1024,
        clock_rate=1,
        memory_clock_rate=1,
        memory_bus_width=1,
        is_integrated=0,
    )


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _answers(target: Target) -> dict[str, Any]:
    """Returns the results of functions of ``torch.cuda``, Dynamo's interface and Triton's driver, by name."""
    properties, capability = _properties(target), _capability(target)
    zeros = (
        *("current_device", "exchange_device", "maybe_exchange_device", "get_raw_stream"),
        *("_exchange_device", "_maybe_exchange_device", "get_current_device", "get_current_stream"),
    )
    yes = ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported", "is_triton_capable")
    nothing = ("set_device", "synchronize", "set_rng_state", "_lazy_init", "raise_if_triton_unavailable")
    return {
        **dict.fromkeys(zeros, 0),
        **dict.fromkeys(yes, True),
        **dict.fromkeys(nothing, None),
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), properties),
        "device_count": 1,
        "get_device_capability": capability,
        "get_compute_capability": target.arch,
        "get_device_name": properties.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_current_target": triton_target(target),
        "get_active_torch_device": DEVICE,
    }


def _interface(functions: Mapping[str, Callable[..., Any]]) -> type:
    """Returns Dynamo's device interface for the stand-in."""
    members = {name: staticmethod(function) for name, function in functions.items()}
    worker = {name: members[name] for name in ("get_device_properties", "current_device", "set_device")}
    base = device_interface.CudaInterface
    return type("StandIn", (base,), {**members, "Worker": type("Worker", (base.Worker,), worker)})


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
def stand_in(target: Target) -> Iterator[None]:
    """Patches torch and Triton to compile for `target`, a GPU, on any machine."""
    functions: dict[str, Any] = {name: _always(answer) for name, answer in _answers(target).items()}
    interface = _interface(functions)
    operators: dict[str, Any] = {
        "__invert__": lambda x: torch.bitwise_not(x),
        "__getitem__": _getitem,
        "copy_": _copy,
    }
    device_interface.get_interface_for_device("cpu")  # torch's own registration comes first
    init_backend_registration()
    with _LOCK, ExitStack() as stack:
        enter = stack.enter_context
        stack.callback(_forget)
        enter(mock.patch.multiple(torch.cuda, create=True, **functions))
        enter(mock.patch.object(torch.version, "cuda", None if _is_amd(target) else _CUDA))
        enter(mock.patch.object(torch.version, "hip", _HIP if _is_amd(target) else None))
        both = {"cuda": interface, "cuda:0": interface}
        enter(mock.patch.dict(device_interface.device_interfaces, both))
        enter(mock.patch.dict(device_interface.caching_worker_device_properties))
        enter(mock.patch.dict(device_interface.caching_worker_current_devices))
        enter(mock.patch.object(triton_helpers, "set_driver_to_gpu", _always(None)))  # it searches for a GPU
        enter(mock.patch.object(fake_tensor, "init_gpu_context", _always(None)))  # it starts CUDA
        enter(mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(**functions)))
        enter(mock.patch.multiple(FakeTensor, create=True, **operators))  # they enter the device of a tensor
        _forget()
        yield


def _forget() -> None:
    """Clears the caches of machine capabilities."""
    _HAS_TRITON.cache_clear()
    for name in _REMEMBERING:
        module = sys.modules.get(name)
        if module is not None:
            for cached in _caches(module):
                cached.cache_clear()


def _caches(module: ModuleType) -> Iterator[Any]:
    for owner in (module, *(item for item in vars(module).values() if isinstance(item, type))):
        for value in vars(owner).values():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(function, functools._lru_cache_wrapper) and function.__module__ == module.__name__:
                yield function
