"""Runs modules that Inductor wrote for a GPU on CPU tensors, their kernels in Triton's interpreter.

    python run_interpreted.py FOLDER        with TRITON_INTERPRET=1 and tests/triton_interpreter importable

FOLDER holds forward.py and backward.py, or one of forward.py and inference.py, inputs.pt (what it is called
with), gradient.pt. The results are written to results.pt: the first output of forward, then what backward
returns; all outputs where there is no backward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import exact_interpreter
import torch
from modules import load


def main(folder):
    exact_interpreter.pytest_configure()
    inputs = torch.load(folder / "inputs.pt")
    first = next(path for name in ("forward", "inference") if (path := folder / f"{name}.py").exists())
    out, *saved = load(first.read_text())(list(inputs))
    results = [out] if (folder / "backward.py").exists() else [out, *saved]
    if (folder / "backward.py").exists():
        gradient = torch.load(folder / "gradient.pt")
        results += load((folder / "backward.py").read_text())([*saved, gradient])
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
