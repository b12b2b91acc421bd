"""Memory of large stored weights has huge pages, where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.formats import stored_form
from mxcompile.storage.cast import cast
from mxcompile.storage.pages import on_huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 1 << 26
E4M3 = stored_form(torch.float8_e4m3fn, "rceil")


def advised(tensor: torch.Tensor) -> bool:
    """Whether the middle of the memory of `tensor` is in a mapping with the flag of `MADV_HUGEPAGE`."""
    middle = tensor.untyped_storage().data_ptr() + tensor.nbytes // 2
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(mapping[1], 16) <= middle < int(mapping[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping has the tensor")


needs_huge_pages = pytest.mark.skipif(
    not ENABLED.exists() or not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages"
)


@needs_huge_pages
def test_a_large_stored_weight_has_huge_pages():
    x = torch.randn(4096, SIZE // 4096).bfloat16()
    weight = cast(x, -1, E4M3)
    assert advised(weight.qdata)
    assert torch.equal(weight.qdata[:9].view(torch.uint8), cast(x[:9], -1, E4M3).qdata.view(torch.uint8))


@needs_huge_pages
def test_memory_that_was_in_use_has_huge_pages():
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    assert not advised(tensor)
    assert on_huge_pages(tensor) is tensor
    assert advised(tensor)
    assert not tensor[1 << 23 : -(1 << 23)].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1000),
        lambda: torch.empty(SIZE, device="meta"),
        lambda: FakeTensorMode().from_tensor(torch.empty(SIZE, dtype=torch.uint8)),
    ],
    ids=["small", "on a device", "fake"],
)
def test_memory_of_other_tensors_is_left_alone(make, monkeypatch: pytest.MonkeyPatch):
    tensor = make()
    monkeypatch.setattr(ctypes, "CDLL", None)  # no call of madvise
    assert on_huge_pages(tensor) is tensor
