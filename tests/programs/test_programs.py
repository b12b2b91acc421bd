"""Programs as users write them run in fresh processes, with empty caches, and assert what must hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted({path.stem for path in HERE.glob("*.py")} - {"shared", Path(__file__).stem})


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_in_a_fresh_process_holds_its_assertions(program: str, tmp_path: Path):
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / f"{program}.py"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
