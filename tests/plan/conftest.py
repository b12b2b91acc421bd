"""Shared by the tests of plans."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the messages of mxcompile so far; Dynamo's own warnings are turned off, as users do."""
    caplog.set_level(logging.ERROR, "torch._dynamo")
    caplog.set_level(logging.WARNING, "mxcompile")  # the last level is that of the handler too
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("mxcompile")]
