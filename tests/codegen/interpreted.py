"""Generated modules in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent


def interpret(folder: Path, inputs: Sequence[Tensor], gradient: Tensor | None = None) -> list[Tensor]:
    """The first output of the code in `folder` called with `inputs`, then the gradients its backward returns.

    inputs: as the module takes them, in the order of their first use in the model.
    """
    torch.save(list(inputs), folder / "inputs.pt")
    torch.save(gradient, folder / "gradient.pt")
    paths = [str(HERE.parent / "triton_interpreter"), str(HERE.parent), *sys.path]
    command = [sys.executable, str(HERE / "run_interpreted.py"), str(folder)]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return torch.load(folder / "results.pt")
