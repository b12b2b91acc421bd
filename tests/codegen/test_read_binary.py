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


@pytest.fixture
def undisassembled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(binary, "disassemble", lambda _: "")
    return monkeypatch


def test_damaged_cubin_is_a_problem_with_reason():
    (problem,) = read({"cubin": b"damaged", "ptx": ""}).problems
    assert problem.startswith("nvdisasm does not read the kernel: nvdisasm fatal")


def test_missing_cuobjdump_is_a_problem_with_reason(undisassembled: pytest.MonkeyPatch):
    undisassembled.setattr(binary, "_CUOBJDUMP", "/no/cuobjdump")
    (problem,) = read({"cubin": b"x", "ptx": ""}).problems
    assert problem.startswith("cuobjdump does not read the kernel: [Errno 2]")


def test_a_tool_whose_words_are_others(undisassembled: pytest.MonkeyPatch):
    words = SimpleNamespace(stdout="registers 40", stderr="")
    undisassembled.setattr(binary, "run_tool", lambda *_, **__: words)
    (problem,) = read({"cubin": b"x", "ptx": ""}).problems
    assert problem.startswith("cannot read a kernel's registers")


def test_failing_assembler_is_a_problem_with_reason(undisassembled: pytest.MonkeyPatch):
    """The dump says that the kernel has a stack; whether it is of spills, the assembler would say."""
    run_tool = binary.run_tool

    def dumped(tool, *args, **options):
        usage = SimpleNamespace(stdout=USAGE, stderr="")
        return usage if "dump" in str(tool) else run_tool(tool, *args, **options)

    undisassembled.setattr(binary, "run_tool", dumped)
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
    whole = read({"amdgcn": ".vgpr_count: 64\n.vgpr_spill_count: 3\n"}, "gfx950")
    assert (whole.registers, whole.spill_bytes) == (64, 12)
    (problem,) = read({"amdgcn": ""}, "gfx950").problems
    assert problem.startswith("cannot read a kernel's registers")
