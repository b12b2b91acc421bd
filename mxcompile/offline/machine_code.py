"""Machine code as data: instructions, loops, and waits for memory.

The input is the output of ``nvdisasm -c`` for NVIDIA and the compiler's assembly for AMD. It is read up to
the last unconditional end of the program; the code after it contains retries of waits, traps and slow paths
of arithmetic. A backward branch makes a loop. Forward branches count as not taken, so both sides of a
condition count. PTX is read only for the loads in its loops, because NVIDIA's assembler unrolls some loops
and merges loads of others.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

from mxcompile.errors import TargetError

_NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"

_NVIDIA_LINE = re.compile(
    r"\s+/\*[0-9a-f]{4,6}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_AMD_LINE = re.compile(r"\s+(?P<guard>)(?P<opcode>(?:v|s|ds|global|buffer|flat|scratch)_\w+)(?P<rest>[^;]*)")
_PTX_LINE = re.compile(r"\s+(?P<guard>@!?%p\d+\s+)?(?P<opcode>[a-z][\w.]+)(?P<rest>[^;]*);")
_LABEL = re.compile(r"(\.?[\w$]+):")
_TARGET = re.compile(r"`?\(?([.$]L\w+)\)?")
_REGISTERS = re.compile(r"\bR(\d+)\b|\bv(\d+)\b|\bv\[(\d+):(\d+)\]")
_WIDTH = re.compile(r"\.(64|128|256)\b")
_LOADS = ("LDG.", "global_load", "buffer_load", "flat_load", "ld.global")
_COPIED, _WAIT_FOR_COPIES = "LDGDEPBAR", re.compile(r"SB\d, (0x[0-9a-f]+)$")
_PRODUCTS = ("UTC", "HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "OMMA", "v_mfma", "v_smfmac")
_NO_PRODUCTS = ("UTCBAR", "UTCATOMSWS", "UTCCP")
_BARRIERS = ("BAR", "s_barrier")
_WAITS = ("NANOSLEEP", "SYNCS", "USETMAXREG", "s_sleep")
_WAIT_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """A machine instruction. opcode: opcode with modifiers. operands: rest of the line."""

    opcode: str
    operands: str

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix instruction."""
        return self.opcode.startswith(_PRODUCTS) and not self.opcode.startswith(_NO_PRODUCTS)

    @property
    def waits(self) -> bool:
        """Whether it is a block barrier."""
        return self.opcode.startswith(_BARRIERS)

    @property
    def loads(self) -> bool:
        """Whether it loads device memory into registers. Copies into shared memory do not count."""
        return self.opcode.startswith(_LOADS)

    @property
    def in_flight(self) -> int | None:
        """For a wait for copies into shared memory, the number of groups left in flight; else None."""
        match = _WAIT_FOR_COPIES.match(self.operands) if self.opcode.startswith("DEPBAR") else None
        return int(match[1], 16) if match else None

    @property
    def issues(self) -> bool:
        """Whether it uses an issue slot of the vector units; AMD's scalar unit has its own."""
        return self.opcode != "NOP" and not self.opcode.startswith("s_")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop. first, last: positions of its end instructions. depth: nesting depth, 0 if outermost."""

    first: int
    last: int
    depth: int

    def holds(self, position: int) -> bool:
        """Whether the instruction at `position` is in the loop."""
        return self.first <= position <= self.last


@dataclass(frozen=True)
class MachineCode:
    """A kernel's program. instructions: in order. loops: outer loops first, no spin loops."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]

    @cached_property
    def product_loops(self) -> tuple[Loop, ...]:
        """Loops that contain a matrix instruction, outer loops first."""
        products = [at for at, instruction in enumerate(self.instructions) if instruction.multiplies]
        return tuple(loop for loop in self.loops if any(map(loop.holds, products)))

    def inner(self, position: int) -> list[Loop]:
        """Returns the loops around the instruction at `position`."""
        return [loop for loop in self.loops if loop.holds(position)]

    def issued(self, trips: Mapping[Loop, float], within: Loop | None = None) -> float:
        """Returns the instructions that a warp issues, in `within` or in all; trip counts default to 1."""
        chosen = self._within(within)
        return sum(self._times(at, trips) for at, instruction in chosen if instruction.issues)

    @cached_property
    def loads_in_loops(self) -> int:
        """Number of load instructions in loop bodies."""
        return sum(op.loads and bool(self.inner(at)) for at, op in enumerate(self.instructions))

    def barriers(self, within: Loop | None = None) -> int:
        """Returns the number of barriers in the body of `within`, or in all."""
        return sum(instruction.waits for _, instruction in self._within(within))

    def products(self, within: Loop | None = None) -> int:
        """Returns the number of matrix instructions in the body of `within`, or in all."""
        return sum(instruction.multiplies for _, instruction in self._within(within))

    def round_trips(self, trips: Mapping[Loop, float]) -> float:
        """Returns how often a warp waits for device memory.

        A batch of loads ends at the first use of a loaded register and counts as one wait. A wait for copies
        into shared memory that leaves the copies of n iterations in flight counts as 1/(n + 1), because the
        awaited copy started n + 1 iterations earlier.
        """
        loads = sum(self._times(at, trips) for at in self._uses())
        return loads + sum(self._times(at, trips) / rounds for at, rounds in self._copies())

    def waits(self, loop: Loop) -> int:
        """Returns the waits in the body of `loop` for loads or copies that the same iteration started."""
        copies = sum(rounds == 1 for at, rounds in self._copies() if loop.holds(at))
        return sum(1 for _ in self._uses(loop)) + copies

    def _uses(self, loop: Loop | None = None) -> Iterator[int]:
        """Yields the positions that wait for a batch of loads."""
        waiting: set[int] = set()
        for position, instruction in self._within(loop):
            if waiting & set(_registers(instruction.operands)):
                yield position
                waiting.clear()
            if instruction.loads:
                waiting.update(_destination(instruction))

    def _copies(self) -> Iterator[tuple[int, int]]:
        """Yields (position, age of the awaited copies in iterations) for each wait for copies."""
        for position, instruction in enumerate(self.instructions):
            if instruction.in_flight is None:
                continue
            loop = next(reversed(self.inner(position)), None)
            groups = sum(line.opcode == _COPIED for _, line in self._within(loop))
            if groups:
                yield position, instruction.in_flight // groups + 1

    def _within(self, loop: Loop | None) -> Iterator[tuple[int, Instruction]]:
        first, last = (loop.first, loop.last) if loop else (0, len(self.instructions))
        return ((at, instruction) for at, instruction in enumerate(self.instructions) if first <= at <= last)

    def _times(self, position: int, trips: Mapping[Loop, float]) -> float:
        return math.prod((trips.get(loop, 1.0) for loop in self.inner(position)), start=1.0)


def disassemble(cubin: bytes) -> str:
    """Returns NVIDIA's machine code as text, by the tool bundled with Triton. Raises `TargetError`."""
    return run_tool(_NVDISASM, "-c", content=cubin, suffix=".cubin").stdout


def run_tool(
    tool: str | Path, *options: str, content: bytes, suffix: str
) -> subprocess.CompletedProcess[str]:
    """Runs `tool` on a file with `content`. Raises `TargetError` if it fails."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        try:
            return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = str(getattr(error, "stderr", "") or error).strip().splitlines()[0]
            raise TargetError(f"{Path(tool).name} does not read the kernel: {message}") from None


def parse(text: str) -> MachineCode:
    """Parses the output of `disassemble`, AMD's assembly, or PTX. Empty text has no instructions."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    end = 0
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label is not None:
            labels[label[1]] = len(instructions)
            continue
        match = _NVIDIA_LINE.match(line) or _AMD_LINE.match(line) or _PTX_LINE.match(line)
        if match is None:
            continue
        instructions.append(Instruction(match["opcode"], match["rest"].strip()))
        if match["opcode"] in ("EXIT", "s_endpgm", "ret") and not match["guard"]:
            end = len(instructions)
    kept = tuple(instructions[:end])
    return MachineCode(kept, tuple(_loops(kept, labels)))


def _loops(instructions: tuple[Instruction, ...], labels: Mapping[str, int]) -> Iterator[Loop]:
    """Yields a loop for each target of backward branches, up to the last branch to it."""
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if not instruction.opcode.startswith(("BRA", "s_branch", "s_cbranch", "bra")):
            continue
        first = labels.get(next(iter(_TARGET.findall(instruction.operands)), ""), position + 1)
        if first <= position:
            last[first] = position
    spans = [(first, end) for first, end in last.items() if not _is_wait(instructions[first : end + 1])]
    for first, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        depth = sum(a <= first and end <= b for a, b in spans) - 1
        yield Loop(first, end, depth)


def _is_wait(body: Sequence[Instruction]) -> bool:
    return len(body) <= _WAIT_LENGTH and any(instruction.opcode.startswith(_WAITS) for instruction in body)


def _registers(operands: str) -> Iterator[int]:
    for nvidia, amd, first, last in _REGISTERS.findall(operands):
        if first:
            yield from range(int(first), int(last) + 1)
        else:
            yield int(nvidia or amd)


def _destination(instruction: Instruction) -> list[int]:
    first = next(iter(_REGISTERS.finditer(instruction.operands)), None)
    if first is None:
        return []
    filled = list(_registers(first[0]))
    width = _WIDTH.search(instruction.opcode)
    return list(range(filled[0], filled[0] + int(width[1]) // 32)) if width and len(filled) == 1 else filled
