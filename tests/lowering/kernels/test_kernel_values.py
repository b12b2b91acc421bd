"""Runs the value checks of ``tests/triton_interpreter``, in a process of their own.

Triton decides when it is imported whether kernels are compiled or interpreted, and here other tests compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "triton_interpreter"
CHECKS = sorted(FOLDER.glob("check_*.py"))


@pytest.mark.slow
def test_value_checks_pass_in_the_interpreter():
    plugins = ["-p", "exact_interpreter", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--tb=short", *map(str, CHECKS)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(FOLDER)},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-12000:]}{done.stderr[-2000:]}"
