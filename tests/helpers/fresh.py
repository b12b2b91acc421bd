"""What every test starts with, for the conftest of all tests and for the one of the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import mxcompile


def forget() -> None:
    """Drop compiled code and reports: what follows is as in a process that has compiled nothing."""
    torch._dynamo.reset()
    mxcompile.clear_reports()


def fresh_state() -> Iterator[None]:
    """A test without compiled code or reports of another."""
    torch.manual_seed(0)
    yield
    forget()
