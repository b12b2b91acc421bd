"""Cross-compilation of generated kernels, and inspection of the binaries.

A kernel is compiled as Inductor would compile it on the target machine. Inductor would time several
configurations; here the lowest estimate decides. If no configuration fits the chip's resources, the last
configuration is compiled without load pipelining, as Inductor does. Registers, spills and shared memory come
from the binary: for NVIDIA by Triton's ``cuobjdump``, for AMD from the metadata in the assembly.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from torch._inductor.codecache import PyCodeCache
from triton.backends.nvidia.compiler import get_ptxas

from mxcompile.errors import TargetError
from mxcompile.lowering.targets import Target
from mxcompile.offline.machine_code import disassemble, run_tool

log = logging.getLogger(__name__)

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_MMA = re.compile(
    r"(?<![\w.])(tcgen05\.mma[\w.:]*|wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*|v_mfma\w*|v_smfmac\w*)(.*)"
)
_AMD_FORMATS = re.compile(r" (?:cbsz|blgp):\d")
"""Operand formats of a scaled MFMA: 0 is E4M3, 1 E5M2, 4 E2M1; 0 is omitted."""
_TEXT = ("ttir", "ttgir", "llir", "ptx", "amdgcn")
_BINARY = ("cubin", "hsaco")
_AMD_KEYS = "vgpr_count", "vgpr_spill_count"


@dataclass(frozen=True, kw_only=True, slots=True)
class Binary:
    """A compiled kernel.

    settings: block sizes, warps and stages. num_configs: configurations that Inductor would time. registers:
    registers per thread. spill_bytes: spilled bytes per thread. shared_bytes: shared memory per block.
    tmem_columns: columns of tensor memory per block. mma: distinct matrix instructions; AMD's scaled
    instructions include the formats of their operands. text: TTGIR, PTX, SASS or AMD assembly by file suffix.
    image: cubin or hsaco by file suffix. problems: reasons why the kernel cannot run on the target.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_configs: int = 0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    tmem_columns: int = 0
    mma: tuple[str, ...] = ()
    text: Mapping[str, str] = field(default_factory=dict, repr=False)
    image: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    problems: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        """The settings as text."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


def cross_compile(name: str, source: str, target: Target, time: Callable[[Binary], float]) -> Binary:
    """Compiles the kernel `name` in `source`, a module written by Inductor, for `target`.

    time: returns the estimate of a binary in µs, which selects the fastest binary without problems. A kernel
    that does not compile has the reason in its `problems`. The caller must be inside ``stand_in(target)``.
    """
    tuner = vars(PyCodeCache.load(source))[name]
    binaries = [_compiled(name, tuner, config, target) for config in tuner.configs]
    fitting = [binary for binary in binaries if not binary.problems]
    if not fitting and (last := _without_pipelining(tuner.configs[-1])) is not None:
        fitting = [binary for binary in [_compiled(name, tuner, last, target)] if not binary.problems]
    return min(fitting, key=time) if len(fitting) > 1 else [*fitting, *binaries][0]


def _without_pipelining(config: Any) -> Any | None:
    """Returns Inductor's fallback if all configurations lack resources; None if it equals `config`."""
    if config.num_stages <= 1 and config.kwargs.get("NUM_STAGES", 1) <= 1:
        return None
    last = copy.deepcopy(config)
    last.num_stages = 1
    last.kwargs.update({"NUM_STAGES": 1} if "NUM_STAGES" in last.kwargs else {})
    return last


def _compiled(name: str, tuner: Any, config: Any, target: Target) -> Binary:
    described = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    results: list[Any] = []
    compile_kernel = triton.compile

    def keep(source: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = compile_kernel(source, *args, **kwargs)
        if source.fn is tuner.fn:  # an autotuner's threads may compile other kernels
            results.append(kernel)
        return kernel

    try:
        with mock.patch.object(triton, "compile", keep):
            tuner._precompile_config(config)
    except Exception as error:  # Triton and its assembler raise errors of many classes
        log.info("%s does not compile for %s", name, target.name, exc_info=True)
        problem = f"does not compile: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return Binary(settings=described, num_configs=len(tuner.configs), problems=(problem,))
    (kernel,) = results
    return read_binary(
        kernel.asm, kernel.metadata, target, settings=described, num_configs=len(tuner.configs)
    )


def read_binary(asm: Mapping[str, Any], metadata: Any, target: Target, **fields: Any) -> Binary:
    """Returns the `Binary` of Triton's output. fields: further fields of `Binary`."""
    text = {suffix: str(asm[suffix]) for suffix in _TEXT if suffix in asm}
    image = {suffix: bytes(asm[suffix]) for suffix in _BINARY if suffix in asm}
    registers = spill_bytes = 0
    unread = []
    try:
        if "cubin" in image:
            text["sass"] = disassemble(image["cubin"])
        registers, spill_bytes = _resources(text, image)
        if spill_bytes and "ptx" in text and isinstance(target.arch, int):
            spill_bytes = _spilled(text["ptx"], target.arch)
    except TargetError as error:
        unread = [str(error)]
    tmem = int(getattr(metadata, "tmem_size", None) or 0)
    assembly = text.get("ptx") or text.get("amdgcn", "")
    return Binary(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=int(metadata.shared),
        tmem_columns=tmem,
        mma=tuple(sorted({name + _formats(name, rest) for name, rest in _MMA.findall(assembly)})),
        text=text,
        image=image,
        problems=(*_problems(int(metadata.shared), tmem, target), *unread),
        **fields,
    )


def _formats(name: str, operands: str) -> str:
    """Returns the operand formats of a scaled MFMA instruction, "" for other instructions."""
    return "".join(_AMD_FORMATS.findall(operands)) if name.startswith("v_mfma_scale") else ""


def _problems(shared_bytes: int, tmem_columns: int, target: Target) -> list[str]:
    limits = (
        (shared_bytes, "bytes of shared memory", target.shared_bytes),
        (tmem_columns, "columns of tensor memory", target.tmem_columns),
    )
    return [f"{needs} {unit}, {target.name} has {has}" for needs, unit, has in limits if needs > has]


def _resources(text: Mapping[str, str], image: Mapping[str, bytes]) -> tuple[int, int]:
    """Returns registers per thread and local memory bytes per thread. Raises `TargetError`."""
    if "cubin" in image:
        dump = run_tool(_CUOBJDUMP, "--dump-resource-usage", content=image["cubin"], suffix=".cubin").stdout
        registers, stack, local = _numbers(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump)[:3]
        return registers, stack + local
    assembly = text.get("amdgcn", "")
    registers, spills = (_numbers(rf"\.{key}:\s+(\d+)", assembly)[-1] for key in _AMD_KEYS)
    return registers, 4 * spills


def _numbers(pattern: str, text: str) -> list[int]:
    """Returns the groups of all matches of `pattern` in `text`. Raises `TargetError` without a match."""
    numbers = [int(number) for match in re.finditer(pattern, text) for number in match.groups()]
    if not numbers:
        raise TargetError(
            f"cannot read a kernel's registers: no {pattern!r} in the output of the compiler's tools"
        )
    return numbers


def _spilled(ptx: str, arch: int) -> int:
    """Returns the bytes that the assembler spills. Raises `TargetError`.

    The stack size does not measure spills, because the stack also holds arrays, e.g. for sine's slow path.
    """
    gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    options = "-v", "--regAllocOptLevel=2", f"--gpu-name={gpu}", "-o", "/dev/null"
    log = run_tool(get_ptxas(arch).path, *options, content=ptx.encode(), suffix=".ptx").stderr
    return sum(_numbers(r"(\d+) bytes spill stores", log))
