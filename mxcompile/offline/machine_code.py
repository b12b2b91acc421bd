"""Machine code as data: instructions in order, the loops they lie in, the memory they wait for.

Read from ``nvdisasm -c`` for NVIDIA and from the compiler's assembly for AMD, up to the last unconditional
end of the program: what lies behind are waits that did not succeed at once, traps and slow paths of
arithmetic. A branch backwards makes a loop. Forward branches count as not taken, so that both sides of a
condition are counted. PTX is read for the loads in its loops alone: NVIDIA's assembler writes several rounds
of some loops out, and merges loads of others.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
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
    """opcode: with its modifiers. operands: the rest of the line."""

    opcode: str
    operands: str

    @property
    def multiplies(self) -> bool:
        """Whether it is one of the matrix units'."""
        return self.opcode.startswith(_PRODUCTS) and not self.opcode.startswith(_NO_PRODUCTS)

    @property
    def waits(self) -> bool:
        """Whether it is a barrier of the whole block."""
        return self.opcode.startswith(_BARRIERS)

    @property
    def loads(self) -> bool:
        """Whether it reads device memory into registers. Copies into shared memory do not."""
        return self.opcode.startswith(_LOADS)

    @property
    def left(self) -> int | None:
        """How many groups of copies may go on behind it, if it waits for copies into shared memory."""
        match = _WAIT_FOR_COPIES.match(self.operands) if self.opcode.startswith("DEPBAR") else None
        return int(match[1], 16) if match else None

    @property
    def issues(self) -> bool:
        """Whether it takes a slot of the vector units' issue; AMD's scalar unit has one of its own."""
        return self.opcode != "NOP" and not self.opcode.startswith("s_")


@dataclass(frozen=True, slots=True)
class Loop:
    """first, last: positions of its instructions. depth: 0 for an outermost."""

    first: int
    last: int
    depth: int

    def holds(self, position: int) -> bool:
        """Whether the instruction at `position` lies in it."""
        return self.first <= position <= self.last


@dataclass(frozen=True)
class MachineCode:
    """A kernel's program. instructions: in order. loops: outer ones first; waits for an event are none."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]

    @cached_property
    def product_loops(self) -> tuple[Loop, ...]:
        """The loops that hold a matrix instruction, outer ones first."""
        products = [at for at, instruction in enumerate(self.instructions) if instruction.multiplies]
        return tuple(loop for loop in self.loops if any(map(loop.holds, products)))

    def inner(self, position: int) -> list[Loop]:
        """The loops around the instruction at `position`."""
        return [loop for loop in self.loops if loop.holds(position)]

    def issued(self, trips: Mapping[Loop, float], within: Loop | None = None) -> float:
        """Instructions that a warp issues, in `within` or in all; a loop that is not in `trips` runs once."""
        chosen = self._within(within)
        return sum(self._times(at, trips) for at, instruction in chosen if instruction.issues)

    @cached_property
    def loads_in_loops(self) -> int:
        """Loads in the bodies of loops, each once."""
        return sum(each.loads and bool(self.inner(at)) for at, each in enumerate(self.instructions))

    def barriers(self, within: Loop | None = None) -> int:
        """Barriers in the body of `within`, or in all."""
        return sum(instruction.waits for _, instruction in self._within(within))

    def products(self, within: Loop | None = None) -> int:
        """Matrix instructions in the body of `within`, or in all."""
        return sum(instruction.multiplies for _, instruction in self._within(within))

    def round_trips(self, trips: Mapping[Loop, float]) -> float:
        """How often a warp waits for device memory: batches of loads, each ended by the first use of one.

        And groups of copies into shared memory, each ended by its wait; a wait that leaves those of n rounds
        of its loop to go on is for a copy that began n + 1 rounds before, and counts as a part of one.
        """
        loads = sum(self._times(at, trips) for at in self._uses())
        return loads + sum(self._times(at, trips) / rounds for at, rounds in self._copies())

    def waits(self, loop: Loop) -> int:
        """Waits in the body of `loop` for what the same round has begun to load or copy."""
        copies = sum(rounds == 1 for at, rounds in self._copies() if loop.holds(at))
        return sum(1 for _ in self._uses(loop)) + copies

    def _uses(self, loop: Loop | None = None) -> Iterator[int]:
        """Positions that wait for a batch of loads."""
        waiting: set[int] = set()
        for position, instruction in self._within(loop):
            if waiting & set(_registers(instruction.operands)):
                yield position
                waiting.clear()
            if instruction.loads:
                waiting.update(_destination(instruction))

    def _copies(self) -> Iterator[tuple[int, int]]:
        """Positions that wait for copies, and how many rounds of their loop those have had."""
        for position, instruction in enumerate(self.instructions):
            if instruction.left is None:
                continue
            loop = next(reversed(self.inner(position)), None)
            groups = sum(each.opcode == _COPIED for _, each in self._within(loop))
            if groups:
                yield position, instruction.left // groups + 1

    def _within(self, loop: Loop | None) -> Iterator[tuple[int, Instruction]]:
        first, last = (loop.first, loop.last) if loop else (0, len(self.instructions))
        return ((at, each) for at, each in enumerate(self.instructions) if first <= at <= last)

    def _times(self, position: int, trips: Mapping[Loop, float]) -> float:
        times = 1.0
        for loop in self.inner(position):
            times *= trips.get(loop, 1.0)
        return times


def disassemble(cubin: bytes) -> str:
    """NVIDIA's machine code as text, by the tool that comes with Triton. Raises `TargetError`."""
    return run_tool(_NVDISASM, "-c", content=cubin, suffix=".cubin").stdout


def run_tool(
    tool: str | Path, *options: str, content: bytes, suffix: str
) -> subprocess.CompletedProcess[str]:
    """Run `tool` on a file with `content`. Raises `TargetError` if it fails."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        try:
            return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = str(getattr(error, "stderr", "") or error).strip().splitlines()[0]
            raise TargetError(f"{Path(tool).name} does not read the kernel: {message}") from None


def parse(text: str) -> MachineCode:
    """Returns the output of `disassemble`, AMD's compiler, or PTX as data. Empty text has no instructions."""
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
    """A loop per place that branches go back to, to the last that does."""
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


def _is_wait(body: Iterable[Instruction]) -> bool:
    body = list(body)
    return len(body) <= _WAIT_LENGTH and any(each.opcode.startswith(_WAITS) for each in body)


def _registers(operands: str) -> Iterator[int]:
    for nvidia, amd, first, last in _REGISTERS.findall(operands):
        if first:
            yield from range(int(first), int(last) + 1)
        else:
            yield int(nvidia or amd)


def _destination(instruction: Instruction) -> list[int]:
    """The registers that a load fills."""
    first = next(iter(_REGISTERS.finditer(instruction.operands)), None)
    if first is None:
        return []
    filled = list(_registers(first[0]))
    width = _WIDTH.search(instruction.opcode)
    return list(range(filled[0], filled[0] + int(width[1]) // 32)) if width and len(filled) == 1 else filled
