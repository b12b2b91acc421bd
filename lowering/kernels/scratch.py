"""Scratch memory of kernels that make descriptors on the device.

Triton asks an allocator for it at each launch, and finds it in a context variable: set in one thread, it is
not set in another. Inductor sets it when it launches a kernel for the first time; compiled code that other
threads or contexts call (a server's, a pipeline schedule's, autograd's for backward) has to see to it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.runtime import _allocation


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def provide() -> None:
    """Give this context PyTorch's allocator on the current device, unless it has one."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate)
