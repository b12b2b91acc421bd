"""A function called like the submodule it lives in stays a function, whatever is imported first."""

from __future__ import annotations

import subprocess
import sys


def test_audit_and_tune_are_the_functions() -> None:
    code = (
        "import mxcompile.tune.bounds, mxcompile\n"
        "print(*(type(f).__name__ for f in (mxcompile.audit, mxcompile.tune)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["function", "function"]
