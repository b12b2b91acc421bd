"""Runs modules that Inductor wrote for a GPU on CPU tensors, their kernels in Triton's interpreter.

    python run_interpreted.py FOLDER        with TRITON_INTERPRET=1 and tests/triton_interpreter importable

FOLDER holds forward.py and backward.py, or one of forward.py and inference.py, inputs.pt (what it is called
with), gradient.pt. The results are written to results.pt: the first output of forward, then what backward
returns; all outputs where there is no backward. New memory starts as 0xFF, NaN in every format, so that what
is read without being written shows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import exact_interpreter
import torch
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import GridExpr

HEADER = {
    r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    r"empty_strided_cuda = .*": "empty_strided_cuda = poisoned",
    r"async_compile = AsyncCompile\(\)": "async_compile = Interpreter()",
    r"torch\.cuda\._DeviceGuard\(0\)": "nothing()",
    r"torch\.cuda\.set_device\(0\)": "None",
}
KERNEL = {r"triton_helpers\.set_driver_to_gpu\(\)": "", r"\blibdevice\.": "tl.math."}


def poisoned(size, stride, dtype):
    """New memory."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    made.untyped_storage().copy_(
        torch.full((made.untyped_storage().nbytes(),), 0xFF, dtype=torch.uint8).untyped_storage()
    )
    return made


class Interpreted:
    """A kernel with the configuration it would be launched with."""

    def __init__(self, function, config, meta):
        self.function, self.config, self.meta = function, config, meta

    def run(self, *arguments, stream=None):
        """Launch it."""
        extra = self.meta.get("extra_launcher_args", [])
        named = dict(zip(extra, arguments[len(arguments) - len(extra) :], strict=True))
        arguments = arguments[: len(arguments) - len(extra)]
        grid = GridExpr.from_meta(self.meta, self.config, mode="python")
        scope = {**dict(zip(self.function.arg_names, arguments, strict=False)), **self.config.kwargs, **named}
        for line in grid.prefix:
            exec(line, scope)
        size = [eval(str(axis), scope) for axis in (grid.x_grid, grid.y_grid, grid.z_grid)]
        self.function[tuple(size)](*arguments, **self.config.kwargs)


class Interpreter:
    """Stands for Inductor's compiler of kernels."""

    def triton(self, name, source, device_str):
        """The kernel called `name` in `source`."""
        scope = {"__file__": name, "__name__": name}
        for pattern, by in KERNEL.items():
            source = re.sub(pattern, by, source)
        path = Path(sys.argv[1]) / f"interpreted_{name}.py"
        path.write_text(source)
        scope["__file__"] = str(path)
        exec(compile(source, path, "exec"), scope)
        return scope[name]

    def wait(self, scope):
        """Nothing to wait for."""


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def interpret(size_hints, configs, triton_meta, heuristic_type, filename=None, inductor_meta=None, **_):
    """In place of Inductor's autotuner: the first configuration."""
    return lambda function: Interpreted(function, configs[0], inductor_meta)


def load(path):
    """`call` of the module at `path`."""
    source = path.read_text()
    for pattern, by in HEADER.items():
        source = re.sub(pattern, by, source)
    scope = {"Interpreter": Interpreter, "poisoned": poisoned, "nothing": Nothing, "__name__": path.stem}
    exec(compile(source, path, "exec"), scope)
    return scope["call"]


def main(folder):
    exact_interpreter.pytest_configure()
    triton_heuristics.cached_autotune = interpret
    inputs = torch.load(folder / "inputs.pt")
    first = next(path for name in ("forward", "inference") if (path := folder / f"{name}.py").exists())
    out, *saved = load(first)(list(inputs))
    results = [out] if (folder / "backward.py").exists() else [out, *saved]
    if (folder / "backward.py").exists():
        gradient = torch.load(folder / "gradient.pt")
        results += load(folder / "backward.py")([*saved, gradient])
    torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
