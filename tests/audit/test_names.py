"""A function called like the submodule it lives in stays a function, whatever is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first",
    ["import mxcompile.audit.stats", "from mxcompile import audit"],
)
def test_audit_is_the_function(first: str) -> None:
    code = f"{first}\nimport mxcompile\nprint(mxcompile.audit.__name__, type(mxcompile.audit).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["audit", "function"]
