"""The work of a generated kernel, read from its machine code; `estimate` turns the work into times.

    issue      programs · warps · instructions, each times the trip counts of its loops
    mma        tiles of an SM · (FLOPs of a tile, its waits, and the work between two tiles)
    shared     shared memory traffic of matrix units with tensor memory: operand reads, and writes by loads
    latency    waves · batches of loads

Programs run in waves if registers, shared or tensor memory hold fewer than all. A copy into shared memory
whose wait comes n steps later counts 1/n; copies by the tensor memory accelerator count nothing. If the
assembler unrolled a loop, which the number of its loads shows, its trip count is divided accordingly.

A program that is alone on its SM does not multiply while it waits, in a step along K, for loads that the same
step started. Between two tiles it executes the code outside the loop over K: instructions, and
`BARRIER_CYCLES` for each barrier. With warp specialization, separate warps load, multiply, and store a tile
while the next tile is computed, if tensor memory has room for two accumulators; then only the part of the
store that exceeds a tile's products counts.

Matrix units with tensor memory read both operands of each tile from shared memory, at the same bandwidth as
the loads that fill it. A 128×128 tile uses the full bandwidth. Sources give K in bytes; a byte of a packed
operand holds two elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcompile.formats import BLOCK
from mxcompile.lowering.targets import Target
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import Work, peak_of
from mxcompile.offline.machine_code import Loop, MachineCode, parse

_SUSTAINED_ISSUE, _SUSTAINED_MMA = 0.6, 0.8
"""Sustained fractions of issue slots and matrix units, for comparing overlapping work."""

BARRIER_CYCLES = 30
"""Cycles of a block barrier beside its instructions."""

SHARED_BYTES = 128
"""Shared memory bytes per cycle of an SM."""

_FP4 = ("kind::mxf4", "cbsz:4 blgp:4")
"""Parts of the names of packed FP4 instructions; other scaled instructions multiply FP8."""

_NUMBER = re.compile(r"^ +(\w+)(?: ?: tl\.constexpr)? = (\d+)$", re.MULTILINE)
_SPECIALIZED = "WARP_SPECIALIZE : tl.constexpr = True"
_GRID = re.compile(r"'grid_type': '(\w+)'")
_BLOCKS_OF_A_PROCESSOR = 32
_FEW_BLOCKS = 2
"""Largest number of blocks per SM that do not hide each other's waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Figures of a launched kernel.

    work: input of `estimate`. programs: launched blocks. resident: blocks that an SM holds at once.
    instructions: instructions that a warp issues. per_element: instructions per thread and element, for a
    kernel that only casts. between: time between two tiles as a fraction of a tile's time. barriers, waits:
    barriers in one step along K, and waits for loads that the same step started. understood: whether the grid
    and all trip counts are known; loops with unknown trip counts count once.
    """

    work: Work
    programs: int = 0
    resident: int = 0
    instructions: float = 0.0
    per_element: float | None = None
    between: float | None = None
    barriers: int | None = None
    waits: int | None = None
    understood: bool = True


def read(
    *, num_bytes: float, flops: float, source: str, numbers: tuple[int, ...], binary: Binary, target: Target
) -> Facts:
    """Returns the figures of a generated kernel. numbers: numeric launch arguments, the grid last."""
    sizes = {name: int(value) for name, value in _NUMBER.findall(source)}
    sizes |= {name: value for name, value in binary.settings.items() if isinstance(value, int)}
    sizes.setdefault("num_warps", 4)
    code = parse(binary.text.get("sass") or binary.text.get("amdgcn", ""))
    programs = _programs(source, sizes, numbers)
    if not programs or not code.instructions:
        return Facts(work=Work(num_bytes=num_bytes), understood=False)
    launched = _Launched(code, sizes, flops, programs, binary, target, _SPECIALIZED in source)
    tiles = launched.tiles_of_a_processor
    cycles = _cycles_of_us(target)
    issued, barriers = launched.between
    between = issued / _SUSTAINED_ISSUE + barriers * BARRIER_CYCLES
    steady = launched.steady
    waves = math.ceil(programs / (target.processors * launched.resident))
    return Facts(
        work=Work(
            num_bytes=num_bytes,
            issue_us=launched.issue_us,
            mma_us=launched.mma_us,
            product=launched.product,
            shared_us=launched.shared_us,
            between_issue_us=tiles * issued / cycles,
            between_us=tiles * barriers * BARRIER_CYCLES / cycles,
            waits=tiles * launched.waits,
            round_trips=waves * code.round_trips(launched.trips),
            serial=launched.serial,
        ),
        programs=programs,
        resident=launched.resident,
        instructions=launched.instructions,
        per_element=launched.per_element,
        between=between / launched.busy_cycles if steady else None,
        barriers=code.barriers(steady) if steady else None,
        waits=code.waits(steady) if steady else None,
        understood=all(loop in launched.trips for loop in code.loops),
    )


@dataclass(frozen=True)
class _Launched:
    """A kernel's machine code and launch.

    sizes: numbers in its source and settings. specialized: whether it uses warp specialization.
    """

    code: MachineCode
    sizes: Mapping[str, int]
    flops: float
    programs: int
    binary: Binary
    target: Target
    specialized: bool = False

    @property
    def warps(self) -> int:
        return self.sizes["num_warps"]

    @cached_property
    def resident(self) -> int:
        """Blocks that an SM holds at once."""
        threads = self.warps * self.target.warp_size
        limits = [_BLOCKS_OF_A_PROCESSOR, self.target.threads // threads]
        for has, needs in (
            (self.target.registers, math.ceil(self.binary.registers / 8) * 8 * threads),
            (self.target.shared_bytes, self.binary.shared_bytes),
            (self.target.tmem_columns, self.binary.tmem_columns),
        ):
            limits += [has // needs] if needs else []
        return max(1, min(limits))

    @cached_property
    def steady(self) -> Loop | None:
        """The loop along K."""
        return self.code.product_loops[-1] if self.code.product_loops and self.flops else None

    @cached_property
    def k(self) -> float:
        """Length of K that a program sums for a tile; the mean if programs read it from device memory."""
        area = math.prod(self.sizes.get(name, 1) for name in ("BLOCK_M", "BLOCK_N"))
        results = self.sizes.get("NUM_GROUPS", 0) * math.prod(
            math.ceil(self.sizes.get(side, 0) / self.sizes.get(f"BLOCK_{side}", 1)) for side in "MN"
        )
        bytes_ = self.sizes.get("K", 0) / self.sizes.get("PARTS", 1)
        return self._packed * bytes_ or max(1.0, self.flops / (2 * area * (results or self.programs)))

    @cached_property
    def steps(self) -> int:
        return math.ceil(self.k / (self._packed * self.sizes.get("BLOCK_K", 1)))

    @cached_property
    def around(self) -> Loop | None:
        """The loop over tiles of a persistent kernel, else None."""
        if len(self.code.product_loops) < 2:
            return None
        return self.code.product_loops[-2 if self.specialized else 0]

    @cached_property
    def peeled(self) -> int:
        """Steps along K that the compiler peeled off the loop."""
        if self.steady is None:
            return 0
        return self.code.products(self.around) // self.code.products(self.steady) - 1

    @cached_property
    def tiles(self) -> int:
        """Number of result tiles over the whole batch."""
        tile = 2 * self.sizes.get("BLOCK_M", 1) * self.sizes.get("BLOCK_N", 1) * self.k
        return max(1, math.ceil(self.flops / tile))

    @cached_property
    def trips(self) -> dict[Loop, float]:
        """Trip counts of the loops, if known."""
        products = self.code.product_loops
        by_loop: dict[Loop, float] = {products[-1]: max(self.steps - self.peeled, 0)} if products else {}
        if self.around is not None:
            by_loop[self.around] = math.ceil(self.tiles / self.programs)
        if self.specialized and self.around is not None:
            return by_loop | self._trips_of_warps(by_loop[self.around])
        rounds = self._rounds()
        if rounds is not None:
            in_source = parse(self.binary.text.get("ptx", "")).loads_in_loops
            unrolled = max(1, self.code.loads_in_loops // in_source) if in_source else 1
            rounds /= unrolled
            by_loop |= {loop: rounds for loop in self.code.loops if loop.depth == 0 and loop not in by_loop}
        return by_loop

    def _trips_of_warps(self, tiles: float) -> dict[Loop, float]:
        """Returns trip counts under warp specialization.

        Dispatch loops, in which warps wait for a task, count 1 / warps, because a single warp runs each task.
        """
        others = [loop for loop in self.code.loops if loop not in self.code.product_loops]
        rounds = {loop: tiles if loop.depth < 2 else self.steps for loop in others}
        return rounds | dict.fromkeys(self.code.product_loops[:-2], 1 / self.warps)

    def _rounds(self) -> float | None:
        """Returns the trip count of a loop without products (over rows, a reduction, or K) or None."""
        for extent, block in (("RSPLIT_SIZE", "XBLOCK"), ("r0_numel", "R0_BLOCK")):
            if extent in self.sizes and block in self.sizes:
                return math.ceil(self.sizes[extent] / self.sizes[block])
        return self.steps if {"K", "BLOCK_K"} <= self.sizes.keys() else None

    @cached_property
    def serial(self) -> bool:
        """Whether blocks, few per SM, synchronize in every iteration of a loop without products."""
        loops = [loop for loop in self.code.loops if self.trips.get(loop, 1) > 1]
        waits = not self.code.product_loops and any(map(self.code.barriers, loops))
        return waits and self.resident <= _FEW_BLOCKS

    @cached_property
    def instructions(self) -> float:
        return self.code.issued(self.trips)

    @cached_property
    def issue_us(self) -> float:
        """Time in µs to issue all instructions if every issue slot is in use."""
        slots = self.target.issue_rate * self.target.processors
        return self.programs * self.warps * self.instructions / (slots * _cycles_of_us(self.target))

    @cached_property
    def tiles_of_a_processor(self) -> int:
        return math.ceil(self.tiles / min(self.programs, self.target.processors)) if self.steady else 0

    @cached_property
    def mma_us(self) -> float:
        """µs of the products at the data sheet's rate."""
        if self.steady is None:
            return self.flops / (peak_of(self.target).tflops(self.product) * 1e6) if self.binary.mma else 0.0
        return self.tiles_of_a_processor * self.tile_cycles / _cycles_of_us(self.target)

    @cached_property
    def shared_us(self) -> float:
        """µs of operand traffic in shared memory: writes by loads and reads by the matrix units."""
        if self.steady is None or not self.target.tmem_columns:
            return 0.0
        sides = self.sizes.get("BLOCK_M", 1) + self.sizes.get("BLOCK_N", 1)
        scale = 1 / self.sizes.get("BLOCK", BLOCK)
        read = sides * self.k * ((1 + scale) / self._packed if self._scaled else 2)
        cycles = 2 * read / SHARED_BYTES
        return self.tiles_of_a_processor * cycles / _cycles_of_us(self.target)

    @cached_property
    def waits(self) -> int:
        """Waits of a tile for loads in its steps along K; 0 if another block shares the SM."""
        return self.steps * self.code.waits(self.steady) if self.steady and self.resident == 1 else 0

    @cached_property
    def product(self) -> str:
        if self.steady is None and not (self.flops and self.binary.mma):
            return ""
        return "own_fp4" if self._packed > 1 else "own_mxfp8" if self._scaled else "own_bf16"

    @property
    def _scaled(self) -> bool:
        return any("scale" in name for name in self.binary.mma)

    @property
    def _packed(self) -> int:
        """Elements per byte of the operands."""
        return 2 if any(shape in name for name in self.binary.mma for shape in _FP4) else 1

    @cached_property
    def tile_cycles(self) -> float:
        """Cycles of a tile's products at the data sheet's rate."""
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        tile = math.prod(self.sizes.get(name, 1) for name in names) * self._packed
        operations, tflops = 2 * self.steps * tile, peak_of(self.target).tflops(self.product)
        return operations * self.target.processors * _cycles_of_us(self.target) / (tflops * 1e6)

    @cached_property
    def between(self) -> tuple[float, float]:
        """(cycles of instructions with every slot in use, barriers) between the products of two tiles.

        Both are 0 if another block shares the SM.
        """
        if self.resident > 1 or self.steady is None:
            return 0.0, 0.0
        steps = 1 + self.peeled
        issued = self.code.issued({}, self.around) - steps * self.code.issued({}, self.steady)
        barriers = self.code.barriers(self.around) - steps * self.code.barriers(self.steady)
        issued, barriers = max(issued, 0), max(barriers, 0)
        if not self.specialized:
            return issued * self.warps / self.target.issue_rate, barriers
        return issued + self._uncovered_cycles() * _SUSTAINED_ISSUE, 0.0

    @property
    def busy_cycles(self) -> float:
        """Cycles of a tile's products at the sustained rate."""
        return self.tile_cycles / _SUSTAINED_MMA

    def _uncovered_cycles(self) -> float:
        """Returns the cycles of a tile's store that do not overlap with the next tile's products.

        Nothing overlaps if tensor memory has no room for two accumulators.
        """
        outside = [
            loop for loop in self.code.loops if loop.depth == 0 and loop not in self.code.product_loops
        ]
        issued = max((self.code.issued({}, loop) for loop in outside), default=0.0)
        barriers = max(map(self.code.barriers, outside), default=0)
        slots = _SUSTAINED_ISSUE * self.target.issue_rate
        stored = issued * self.warps / slots + barriers * BARRIER_CYCLES
        two = 2 * self.sizes.get("BLOCK_N", 0) < self.target.tmem_columns
        return max(stored - self.busy_cycles, 0.0) if two else stored

    @cached_property
    def per_element(self) -> float | None:
        elements = self.sizes.get("M", 0) * self.sizes.get("N", 0)
        casts = "BLOCK_M" in self.sizes and not any(op.multiplies for op in self.code.instructions)
        threads = self.programs * self.warps * self.target.warp_size
        return self.instructions * threads / elements if elements and casts else None


def _programs(source: str, sizes: Mapping[str, int], numbers: tuple[int, ...]) -> int:
    """Returns the number of launched blocks; 0 for an unknown kind of grid."""
    kind = _GRID.search(source)
    match kind and kind[1]:
        case "FixedGrid":
            return math.prod(numbers[-3:])
        case "MixOrderReductionGrid":
            return math.ceil(sizes["xnumel"] / sizes["RSPLIT_SIZE"]) if "RSPLIT_SIZE" in sizes else 0
        case "Grid1D" | "Grid2D" | "Grid3D" | "Grid2DWithYZOverflow":
            axes = [axis for axis in "xyz" if f"{axis}numel" in sizes]
            return math.prod(
                math.ceil(sizes[f"{axis}numel"] / sizes.get(f"{axis.upper()}BLOCK", 1)) for axis in axes
            )
    return 0


def _cycles_of_us(target: Target) -> float:
    return peak_of(target).clock_ghz * 1e3
