"""What every test starts with, for the conftest of all tests and for the one of the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def fresh_state() -> Iterator[None]:
    """A test without compiled code or reports of another."""
    import mxcompile

    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    mxcompile.clear_reports()
