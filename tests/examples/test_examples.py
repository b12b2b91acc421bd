"""The scripts of examples/ run as they stand, and examples/README.md names each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "tiny.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_script_runs_without_error(script: str, tmp_path: Path):
    """Each script asserts what it shows."""
    done = subprocess.run(
        [sys.executable, FOLDER / script],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_readme_names_every_script():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [script for script in SCRIPTS if f"| `{script}` |" not in text] == []
