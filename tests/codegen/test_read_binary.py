"""A binary that the tools cannot read has a problem, and not 0 registers and no spill."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import binary

METADATA = SimpleNamespace(shared=0, tmem_size=0)
USAGE = " Function k:\n  REG:40 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:560\n"


def read(asm: dict[str, Any], target: str = "sm_90") -> binary.Binary:
    return binary.read_binary(asm, METADATA, TARGETS[target])


def test_damaged_cubin_is_a_problem_with_reason():
    (problem,) = read({"cubin": b"damaged", "ptx": ""}).problems
    assert problem.startswith("nvdisasm does not read the kernel: nvdisasm fatal")


def test_missing_cuobjdump_is_a_problem_with_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binary, "disassemble", lambda _: "")
    monkeypatch.setattr(binary, "_CUOBJDUMP", "/no/cuobjdump")
    (problem,) = read({"cubin": b"x", "ptx": ""}).problems
    assert problem.startswith("cuobjdump does not read the kernel: [Errno 2]")


def test_a_tool_whose_words_are_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(binary, "disassemble", lambda _: "")
    monkeypatch.setattr(
        binary, "run_tool", lambda *_, **__: SimpleNamespace(stdout="registers 40", stderr="")
    )
    (problem,) = read({"cubin": b"x", "ptx": ""}).problems
    assert problem.startswith("cannot read a kernel's registers")


def test_failing_assembler_is_a_problem_with_reason(monkeypatch: pytest.MonkeyPatch):
    """The dump says that the kernel has a stack; whether it is of spills, the assembler would say."""
    monkeypatch.setattr(binary, "disassemble", lambda _: "")
    run_tool = binary.run_tool
    dumped = SimpleNamespace(stdout=USAGE, stderr="")
    monkeypatch.setattr(
        binary,
        "run_tool",
        lambda tool, *_, **options: dumped if "dump" in str(tool) else run_tool(tool, *_, **options),
    )
    (problem,) = read({"cubin": b"x", "ptx": "damaged"}).problems
    assert re.match(r"(ptxas\S*) does not read the kernel: \1", problem)  # Triton has one for Blackwell


class Tuner:
    """Compiles a kernel beside its own, as threads of an autotuner may."""

    fn, configs = "own", ()

    def _precompile_config(self, _: Any) -> None:
        for name in ("other", self.fn, "other"):
            triton.compile(SimpleNamespace(fn=name), target=None)


def test_of_kernels_that_compile_meanwhile_the_own_is_read(monkeypatch: pytest.MonkeyPatch):
    def compiled(source: Any, target: None) -> SimpleNamespace:
        return SimpleNamespace(asm={"ttir": source.fn}, metadata=METADATA)

    monkeypatch.setattr(triton, "compile", compiled)
    config = SimpleNamespace(kwargs={}, num_warps=4, num_stages=1)
    assert binary._compiled("kernel", Tuner(), config, TARGETS["sm_90"]).text["ttir"] == "own"


def test_amd_assembly_gives_registers_and_spills():
    whole = ".vgpr_count: 64\n.vgpr_spill_count: 3\n"
    assert (read({"amdgcn": whole}, "gfx950").registers, read({"amdgcn": whole}, "gfx950").spill_bytes) == (
        64,
        12,
    )
    (problem,) = read({"amdgcn": ""}, "gfx950").problems
    assert problem.startswith("cannot read a kernel's registers")
