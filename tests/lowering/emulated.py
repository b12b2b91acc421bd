"""C++ functions of another instruction set, run by an emulator and called as ctypes calls those of a library.

Every call is a process: a program made of the functions reads a call's arguments, calls, and writes what the
arguments point to. Pointers are those of `cpp_forms.pointer`, alone or as fields of a structure.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAIN = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")


def program(source: str) -> str:
    """`source` with a ``main`` that calls any of its ``extern "C"`` functions."""
    names = re.findall(r'extern "C" \w+ (\w+)\(', source)
    functions = ", ".join(f'{{"{name}", reinterpret_cast<void*>({name})}}' for name in names)
    return source + _MAIN.replace("FUNCTIONS", functions)


class Library:
    """The functions of a program, by name, as those of a ``ctypes.CDLL``.

    command: what runs the program. tensor_at: the tensor that begins at an address, of a structure's fields.
    """

    def __init__(self, command: Sequence[str | Path], tensor_at: Callable[[int], Tensor]) -> None:
        self._command = [*map(str, command)]
        self._tensor_at = tensor_at

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            tensors: list[Tensor] = []
            request = b"".join(self._encoded(arguments, tensors))
            done = subprocess.run([*self._command, name], input=request, capture_output=True, check=False)
            assert done.returncode == 0, (name, done.returncode, done.stderr[-500:])
            at = 8
            for tensor in tensors:
                if tensor.nbytes:
                    data = bytearray(done.stdout[at : at + tensor.nbytes])
                    tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
                at += tensor.nbytes
            assert at == len(done.stdout)
            result: int = struct.unpack_from("<q", done.stdout)[0]
            return result

        return function

    def _encoded(self, arguments: Sequence[Any], tensors: list[Tensor]) -> Iterator[bytes]:
        """The request; `tensors` grows by those that are part of it, in order."""
        yield struct.pack("<q", len(arguments))
        for argument in arguments:
            if isinstance(argument, ctypes.c_float):
                yield struct.pack("<qf4x", -1, argument.value)
            elif isinstance(argument, ctypes.Structure):
                addresses = [getattr(argument, name) for name, *_ in argument._fields_]
                yield struct.pack("<q", len(addresses))
                for address in addresses:
                    yield from _buffer(self._tensor_at(address) if address else None, tensors)
            elif isinstance(argument, ctypes.c_void_p):
                yield struct.pack("<q", 1)
                yield from _buffer(getattr(argument, "tensor", None), tensors)
            else:
                yield struct.pack("<qq", 0, argument.value)


def _buffer(tensor: Tensor | None, tensors: list[Tensor]) -> Iterator[bytes]:
    yield struct.pack("<q", -1 if tensor is None else tensor.nbytes)
    if tensor is not None:
        assert tensor.is_contiguous()
        tensors.append(tensor)
        yield tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
