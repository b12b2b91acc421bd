"""Scratch memory of kernels that make descriptors on the device.

At each launch Triton gets it from an allocator in a context variable, which other threads do not share.
Inductor sets the allocator when it first launches a kernel. Other threads and contexts (a server's, a
pipeline schedule's, autograd's for backward) may call the code later, so the code calls `provide` itself.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.runtime import _allocation


def _allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def provide() -> None:
    """Sets PyTorch's allocator on the current device for this context, unless it has an allocator."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate)
