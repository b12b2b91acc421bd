"""Modules that Inductor wrote for a GPU, run on CPU tensors, their kernels in Triton's interpreter.

    run(function, *inputs, target=...)     what the code generated for the function gives
    results_of_calls(operator, calls, ...)  the same of one module with all the calls of an operator
    load(source)                           ``call`` of a module at hand

A kernel is launched with the grid that Inductor launches it with, for its first configuration. New memory
starts as 0xFF, NaN in every format, so that what is read without being written shows; on both sides of it lie
bytes that no kernel may change. Needs ``TRITON_INTERPRET=1`` and `exact_interpreter`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.utils._pytree import tree_flatten, tree_unflatten

from mxcompile.lowering.targets import TARGETS, Target

HEADER = {
    r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    r"empty_strided_cuda = .*": "empty_strided_cuda = memory.new",
    r"async_compile = AsyncCompile\(\)": "async_compile = Interpreter()",
    r"torch\.cuda\._DeviceGuard\(0\)": "nothing()",
    r"torch\.cuda\.set_device\(0\)": "None",
}
KERNEL = {r"triton_helpers\.set_driver_to_gpu\(\)": "", r"\blibdevice\.": "tl.math."}
_GUARD, _POISON = 64, 0xAB
_MOST = 1 << 17  # elements of a tile
_WIDEST = {"x": 4096, "y": 1024}  # of Inductor's blocks: masks are left out by them
_FOLDER = tempfile.TemporaryDirectory(prefix="interpreted-")


class _Memory:
    """What a module allocates."""

    def __init__(self) -> None:
        self._allocations: list[Tensor] = []

    def new(self, size, stride, dtype) -> Tensor:
        """Poisoned memory between guards."""
        elements = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
        whole = torch.full((elements * dtype.itemsize + 2 * _GUARD,), 0xFF, dtype=torch.uint8)
        whole[:_GUARD] = whole[-_GUARD:] = _POISON
        self._allocations.append(whole)
        return whole[_GUARD:-_GUARD].view(dtype).as_strided(size, stride)

    def check(self) -> None:
        """Nothing beside what was asked for has been written."""
        for whole in self._allocations:
            assert (whole[:_GUARD] == _POISON).all()
            assert (whole[-_GUARD:] == _POISON).all()


class _Launcher:
    """A kernel with the configuration it would be launched with."""

    def __init__(self, function, config, meta) -> None:
        self.function, self.config, self.meta = function, config, meta

    def run(self, *arguments, stream=None) -> None:
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


class _Interpreter:
    """Stands for Inductor's compiler of kernels."""

    def triton(self, name: str, source: str, device_str: str) -> Any:
        """The kernel called `name` in `source`."""
        for pattern, by in KERNEL.items():
            source = re.sub(pattern, by, source)
        with tempfile.NamedTemporaryFile("w", dir=_FOLDER.name, suffix=".py", delete=False) as file:
            file.write(source)  # Triton reads a kernel's source from where its code says it is
        scope = {"__file__": file.name, "__name__": name}
        exec(compile(source, file.name, "exec"), scope)
        return scope[name]

    def wait(self, scope: Any) -> None:
        """Nothing to wait for."""


def _wide(size_hints, configs, triton_meta, heuristic_type, filename=None, inductor_meta=None, **_):
    """In place of Inductor's autotuner: the first configuration, in blocks as wide as they may be.

    Any size of them computes the same, and an interpreter's time is in the number of programs.
    """
    config, hints = configs[0], size_hints or {}
    room = _MOST // max(hints.get("r0_", 1), 1)
    for axis, most in _WIDEST.items():
        block = f"{axis.upper()}BLOCK"
        if block in config.kwargs:
            config.kwargs[block] = max(config.kwargs[block], min(hints.get(axis, 1), room, most))
            room //= config.kwargs[block]
    return lambda function: _Launcher(function, config, inductor_meta)


def load(source: str) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
    """`call` of the module in `source`, which takes the list of its inputs."""
    memory = _Memory()
    for pattern, by in HEADER.items():
        source = re.sub(pattern, by, source)
    scope = {"Interpreter": _Interpreter, "memory": memory, "nothing": nullcontext, "__name__": "generated"}
    triton_heuristics.cached_autotune = _wide
    exec(compile(source, "generated", "exec"), scope)

    def call(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        results = scope["call"](inputs)
        memory.check()
        return results

    return call


def run(function: Callable[..., Any], *inputs: Tensor, target: str | Target) -> tuple[Tensor, ...]:
    """What the code generated for `function` on `target` gives for `inputs`, on the CPU, any strides."""
    from helpers.rendered import rendered  # imports all that generates code, which `load` does without

    chip = TARGETS[target] if isinstance(target, str) else target
    return load(rendered(function, inputs, chip))(list(inputs))


def results_of_calls(
    operator: Callable[..., Any], calls: Sequence[Sequence[Any]], *, target: str | Target
) -> list[Any]:
    """The result of each of `calls`, arguments of `operator`, whose tensors are the module's inputs."""
    leaves, tree = tree_flatten(list(calls))
    results: list[Any] = []

    def function(*inputs: Tensor) -> list[Tensor]:
        tensors = iter(inputs)
        filled = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        flat, shape = tree_flatten([operator(*arguments) for arguments in tree_unflatten(filled, tree)])
        results[:] = [shape]
        return flat

    flat_results = run(function, *(leaf for leaf in leaves if isinstance(leaf, Tensor)), target=target)
    outputs: list[Any] = tree_unflatten(list(flat_results), results[0])
    return outputs
