"""Huge pages for large tensors in host memory.

One token reads every stored weight once, and in pages of 4 KiB a CPU may spend half of that time on address
translation. On many Linux systems, memory has huge pages only after a call of `madvise`
(`/sys/kernel/mm/transparent_hugepage/enabled`). PyTorch calls it under `THP_MEM_ALLOC_ENABLE=1` alone.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path

from torch import Tensor

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Returns `tensor`, whose memory gets huge pages when it is written next. Its values are lost.

    A tensor stays as it is outside Linux, on a device, and where its memory spans no huge page.
    """
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or not (size := _page_bytes()):
        return tensor
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // size) * size
    length = (storage.data_ptr() + storage.nbytes()) // size * size - start
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        # memory that was in use before has small pages; given back, it gets new pages with the next write
        for advice in (mmap.MADV_DONTNEED, mmap.MADV_HUGEPAGE):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
    return tensor


@functools.cache
def _page_bytes() -> int:
    """Returns the size of a huge page, 0 without them."""
    try:
        return int(_SIZE.read_text()) if hasattr(mmap, "MADV_HUGEPAGE") else 0
    except (OSError, ValueError):
        return 0
