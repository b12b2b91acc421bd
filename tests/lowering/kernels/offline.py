"""Compiles a `Launch` for a chip this machine does not have, and reads what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from mxcompile.lowering.kernels.launch import Launch
from mxcompile.lowering.targets import Target

_POINTERS = {
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """assembly: PTX or AMD's. registers: of a thread. shared and tensor memory: as Triton counts them."""

    assembly: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tmem_columns: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.assembly))


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile `launch` as Triton would on `target` with these arguments."""
    signature, constants, attributes = {}, dict(launch.constants), {}
    for position, name in enumerate(launch.kernel.arg_names):
        kind = "constexpr" if name in constants else _kind(launch.arguments[name])
        if kind == "constexpr" and name not in constants:
            constants[name] = launch.arguments[name]
        elif kind != "constexpr" and _divisible(launch.arguments[name]):
            attributes[(position,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    backend = "hip" if isinstance(target.arch, str) else "cuda"
    gpu = GPUTarget(backend, target.arch, target.warp_size)
    kernel = triton.compile(source, target=gpu, options=launch.compiler_options)
    return _amd(kernel) if backend == "hip" else _nvidia(kernel)


def _kind(value: object) -> str:
    """How Triton's launcher specialises an argument: None and 1 are constants, the rest is typed."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    if value is None or value == 1:
        return "constexpr"
    return "i32" if abs(value) < 2**31 else "i64"


def _divisible(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _nvidia(kernel) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    return Compiled(
        assembly=kernel.asm["ptx"],
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        tmem_columns=kernel.metadata.tmem_size or 0,
    )


def _amd(kernel) -> Compiled:
    text = kernel.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    return Compiled(
        assembly=text,
        registers=field("vgpr_count"),
        spilled_bytes=4 * field("vgpr_spill_count") + field("private_segment_fixed_size"),
        shared_bytes=kernel.metadata.shared,
        tmem_columns=0,
    )
