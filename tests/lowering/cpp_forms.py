"""The headers of lowering/cpu alone, compiled for one instruction set after the other, behind ctypes.

Forms of ARM run under qemu-user where this is no ARM machine: `_TOOLS` are Debian's g++-aarch64-linux-gnu and
qemu-user.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import emulated
import pytest
from torch import Tensor
from torch._inductor import config
from torch._inductor.cpp_builder import _get_ffast_math_flags, get_cpp_compiler

from mxcompile.lowering.cpu import kernel

HEADERS = Path(__file__).parents[2] / "lowering" / "cpu"
with config.patch(kernel.exact_settings()):
    FLAGS = (
        *("-O3", "-std=c++17", "-fno-tree-loop-vectorize", "-fopenmp", "-shared", "-fPIC"),
        *" ".join(f"-{option}" for option in _get_ffast_math_flags()).split(),
    )
"""Those of Inductor."""

_AVX2 = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2")
FORMS = {
    "plain": ("-march=x86-64",),
    "avx2 zen 3": (*_AVX2, "-D__znver3__"),  # decodes with other numbers of rows together
    "avx2": _AVX2,
    "avx2 vnni": (*_AVX2, "-mavxvnni"),
    "avx512": (
        *("-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    ),
    "avx512 bf16": ("-march=native", "-DCPU_CAPABILITY_AVX512"),
    "neon": ("-march=armv8-a",),
    "neon dot": ("-march=armv8.2-a+dotprod",),
    "neon bf16 i8mm": ("-march=armv8.6-a",),
}
"""By name, what a compiler is told; Inductor's names of its vector ISAs among it."""

_NEEDS = {
    "plain": "",
    "avx2 zen 3": "avx2",
    "avx2": "avx2",
    "avx2 vnni": "avx_vnni",
    "avx512": "avx512_vl",
    "avx512 bf16": "avx512_bf16",
}
EMULATED = {"neon": "cortex-a72", "neon dot": "neoverse-n1", "neon bf16 i8mm": "max"}
"""By form, the CPU that the emulator is to be."""
_TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64")


def _flags() -> str:
    """What this machine's CPU has, in Linux's names."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").replace("avx512vl", "avx512_vl") if path.exists() else ""


_BEST = [form for form, flag in _NEEDS.items() if flag in _flags()][-1]
PARAMS = [pytest.param(form, marks=[] if form in ("plain", _BEST) else pytest.mark.slow) for form in FORMS]
"""For fixtures: the plain form and this machine's best one every time, the others with the slow tests."""


@functools.cache
def library(form: str, source: str, folder: Path) -> ctypes.CDLL | emulated.Library:
    """`source`, C++ that includes headers of lowering/cpu, as the instruction set called `form` runs it."""
    stem = folder / f"{form.replace(' ', '_')}_{abs(hash(source))}"
    if form in EMULATED:
        return _emulated(form, source, stem)
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"a form of x86-64, not of {platform.machine()}")
    if _NEEDS[form] not in _flags():
        pytest.skip(f"this CPU has no {_NEEDS[form]}")
    stem.with_suffix(".cpp").write_text(source, encoding="utf-8")
    command = [get_cpp_compiler(), *FLAGS, *FORMS[form], f"-I{HEADERS}", str(stem.with_suffix(".cpp"))]
    subprocess.run([*command, "-o", str(stem.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(stem.with_suffix(".so")))


def fixture_of(headers: str, functions: Iterable[str]) -> Any:
    """A fixture of a module: `functions` in C++, which read `headers`, in one form after another."""
    source = unit(headers, functions)

    @pytest.fixture(scope="module", params=PARAMS)
    def fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
        return library(request.param, source, tmp_path_factory.mktemp("forms"))

    return fixture


def unit(headers: str, functions: Iterable[str]) -> str:
    included = [f'#include "{name}"' for name in headers.split()]
    return "\n".join([*included, "using namespace mxcompile;", *functions])


def exported(name: str, parameters: str, body: str) -> str:
    """A function that ctypes finds."""
    return f'extern "C" void {name}({parameters}) {{ {body} }}'


def assembly(form: str, source: str) -> str:
    """What the compiler makes of `source` for the instruction set called `form`, which need not run here."""
    compiler = _emulation()[0] if form in EMULATED else get_cpp_compiler()
    command = [compiler, *FLAGS, *FORMS[form], f"-I{HEADERS}", *("-x", "c++", "-S", "-o", "-", "-")]
    return subprocess.run(command, input=source, check=True, capture_output=True, text=True).stdout


def _emulation() -> list[str]:
    """The compiler and the emulator."""
    programs = [path for path in map(shutil.which, _TOOLS) if path]
    if len(programs) < len(_TOOLS):
        pytest.skip(f"{' and '.join(_TOOLS)} are not installed")
    return programs


def _emulated(form: str, source: str, stem: Path) -> emulated.Library:
    compiler, emulator = _emulation()
    stem.with_suffix(".cpp").write_text(emulated.program(source), encoding="utf-8")
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [compiler, *flags, *FORMS[form], "-static", f"-I{HEADERS}", str(stem.with_suffix(".cpp"))]
    subprocess.run([*command, "-o", str(stem)], check=True)
    return emulated.Library([emulator, "-cpu", EMULATED[form], stem], _TENSORS.__getitem__)


class _Pointer(ctypes.c_void_p):
    tensor: Tensor | None


_TENSORS: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""By address."""


def pointer(x: Tensor | None) -> _Pointer:
    struct = _Pointer(None if x is None else x.data_ptr())
    struct.tensor = x
    if x is not None:
        _TENSORS[x.data_ptr()] = x
    return struct


def integer(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
