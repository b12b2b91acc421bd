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

_MAIN = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

struct Buffer {{
  char* bytes;
  int64_t size;
}};

static int64_t number() {{
  int64_t value;
  if (fread(&value, 8, 1, stdin) != 1) exit(3);
  return value;
}}

int main(int, char** words) {{
  const std::map<std::string, void*> functions = {{{functions}}};
  std::vector<Buffer> buffers;
  auto pointer = [&buffers]() -> int64_t {{
    int64_t size = number();
    if (size < 0) return 0;
    char* bytes = static_cast<char*>(aligned_alloc(64, (size + 64) / 64 * 64));
    if (size && fread(bytes, size, 1, stdin) != 1) exit(3);
    buffers.push_back({{bytes, size}});
    return reinterpret_cast<int64_t>(bytes);
  }};
  float factor = 0;
  int64_t values[20] = {{}}, fields[20][4], count = 0;
  for (int64_t left = number(); left > 0; left--) {{
    int64_t kind = number();
    if (kind < 0) {{
      int64_t bits = number();
      std::memcpy(&factor, &bits, 4);
    }} else if (kind == 0) {{
      values[count++] = number();
    }} else if (kind == 1) {{
      values[count++] = pointer();
    }} else {{  // a structure of more than 16 bytes is passed by its address
      for (int64_t i = 0; i < kind; i++) fields[count][i] = pointer();
      values[count] = reinterpret_cast<int64_t>(fields[count]);
      count++;
    }}
  }}
  const int64_t* v = values;
  using I = int64_t;
  using Function = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, float);
  int64_t result = reinterpret_cast<Function>(functions.at(words[1]))(
      v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15],
      v[16], v[17], v[18], v[19], factor);
  fwrite(&result, 8, 1, stdout);
  for (const Buffer& buffer : buffers) fwrite(buffer.bytes, 1, buffer.size, stdout);
}}
"""


def program(source: str) -> str:
    """`source` with a ``main`` that calls any of its ``extern "C"`` functions."""
    names = re.findall(r'extern "C" \w+ (\w+)\(', source)
    functions = ", ".join(f'{{"{name}", reinterpret_cast<void*>({name})}}' for name in names)
    return source + _MAIN.format(functions=functions)


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
