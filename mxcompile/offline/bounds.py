"""How long a launch takes at least on a chip that is not here, from its machine code: estimates.

    memory     bytes / (MEMORY · bandwidth)
    issue      programs · warps · instructions / (ISSUE · issue rate · processors · clock)
    mma        tiles of a processor · (operations of a tile / (MMA · its rate) + what it waits for +
               what runs between two)
    latency    turns · batches of loads · LATENCY_US

The largest is the bound, and its name says what is in the way. Instructions are those a warp issues, each
as often as its loops go round; programs take turns where registers, shared or tensor memory hold fewer than
there are. Copies into shared memory that are waited for n steps after they began count 1/n; those of the
tensor memory accelerator count nothing. A program that has its processor for itself does not multiply while
it waits, in a step along K, for what that step began to load; and between two tiles it does what is outside
of its loop over K: instructions, and `BARRIER_CYCLES` for each barrier. Where warps specialise, one loads,
one multiplies, and the others store a tile while the next is computed if tensor memory has room for two: of
that only what takes longer than a tile's products is between. A library's kernel is bound by its bytes and
its operations alone. Not in it: launches, caches (bytes are those of whole tensors, once), a last turn that
is not full, clocks that sink under power.

Peaks stand in `lowering.targets`; what of them kernels sustain is assumed here, from published figures:
memory 7 of a B200's 8 TB/s, issue 2.4 of 4 slots, products 0.8 of the data sheet's rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcompile.lowering.targets import Peak, Target
from mxcompile.offline.binary import Binary
from mxcompile.offline.machine_code import Loop, MachineCode, parse

MEMORY, ISSUE, MMA = 0.875, 0.6, 0.8
"""Parts of the peaks of memory, issue slots and matrix units that a good kernel sustains."""

LATENCY_US = 0.7
"""From a load to its first use, under load."""

BARRIER_CYCLES = 30
"""That a barrier of a block costs beside the instructions."""

_NUMBER = re.compile(r"^ +(\w+)(?: ?: tl\.constexpr)? = (\d+)$", re.MULTILINE)
_SPECIALIZED = "WARP_SPECIALIZE : tl.constexpr = True"
_GRID = re.compile(r"'grid_type': '(\w+)'")
_BLOCKS_OF_A_PROCESSOR = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What bounds a launch.

    memory_us, issue_us, mma_us, latency_us: the four times. programs: blocks launched. resident: of them a
    processor holds at once. instructions: a warp issues. per_element: instructions of a thread by elements it
    casts, of a cast alone. between: time between two tiles over a tile's own. barriers, waits: of one step
    along K, waits for what the same step began to load. understood: whether it is known how often every loop
    goes round, and what is launched; if not, such a loop counts once.
    """

    memory_us: float
    issue_us: float = 0.0
    mma_us: float = 0.0
    latency_us: float = 0.0
    programs: int = 0
    resident: int = 0
    instructions: float = 0.0
    per_element: float | None = None
    between: float | None = None
    barriers: int | None = None
    waits: int | None = None
    understood: bool = True

    @property
    def us(self) -> float:
        """The bound."""
        return max(self.memory_us, self.issue_us, self.mma_us, self.latency_us)

    @property
    def by(self) -> str:
        """What makes it: "memory", "issue", "mma" or "latency"."""
        return next(
            name for name in ("memory", "issue", "mma", "latency") if getattr(self, f"{name}_us") == self.us
        )


def of_library(*, num_bytes: float, flops: float, tflops: float, target: Target) -> Bound:
    """Of a kernel that is a library's. tflops: the rate of its products on the data sheet."""
    return Bound(memory_us=_memory_us(num_bytes, target), mma_us=flops / (tflops * MMA * 1e6))


def of_generated(
    *, num_bytes: float, flops: float, source: str, numbers: tuple[int, ...], binary: Binary, target: Target
) -> Bound:
    """Of a generated kernel. numbers: written out where it is launched, the grid last if it is given."""
    sizes = {name: int(value) for name, value in _NUMBER.findall(source)}
    sizes |= {name: value for name, value in binary.settings.items() if isinstance(value, int)}
    code = parse(binary.text.get("sass") or binary.text.get("amdgcn", ""))
    programs = _programs(source, sizes, numbers)
    if not programs or not code.instructions:
        return Bound(memory_us=_memory_us(num_bytes, target), understood=False)
    launched = _Launched(code, sizes, flops, programs, binary, target, _SPECIALIZED in source)
    return Bound(
        memory_us=_memory_us(num_bytes, target),
        issue_us=launched.issue_us,
        mma_us=launched.mma_us,
        latency_us=launched.latency_us,
        programs=programs,
        resident=launched.resident,
        instructions=launched.instructions,
        per_element=launched.per_element,
        between=launched.between_cycles / launched.tile_cycles if launched.steady else None,
        barriers=code.barriers(launched.steady) if launched.steady else None,
        waits=code.waits(launched.steady) if launched.steady else None,
        understood=launched.understood,
    )


@dataclass(frozen=True)
class _Launched:
    """A kernel's machine code and its launch. sizes: the numbers in its source and its settings.

    specialized: whether loads, products and the rest run in warps of their own.
    """

    code: MachineCode
    sizes: Mapping[str, int]
    flops: float
    programs: int
    binary: Binary
    target: Target
    specialized: bool = False

    @cached_property
    def warps(self) -> int:
        return self.sizes.get("num_warps", 4)

    @cached_property
    def resident(self) -> int:
        """Blocks that a processor holds at once."""
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
        """Of a tile; on average, where programs read on the device which part of K is theirs."""
        area = math.prod(self.sizes.get(name, 1) for name in ("BLOCK_M", "BLOCK_N"))
        results = self.sizes.get("NUM_GROUPS", 0) * math.prod(
            math.ceil(self.sizes.get(side, 0) / self.sizes.get(f"BLOCK_{side}", 1)) for side in "MN"
        )
        return self.sizes.get("K") or max(1.0, self.flops / (2 * area * (results or self.programs)))

    @cached_property
    def steps(self) -> int:
        """Along K."""
        return math.ceil(self.k / self.sizes.get("BLOCK_K", 1))

    @cached_property
    def around(self) -> Loop | None:
        """The loop over tiles, if a program makes several."""
        if len(self.code.product_loops) < 2:
            return None
        return self.code.product_loops[-2 if self.specialized else 0]

    @cached_property
    def peeled(self) -> int:
        """Steps along K that the compiler wrote out beside their loop."""
        if self.steady is None:
            return 0
        return self.code.products(self.around) // self.code.products(self.steady) - 1

    @cached_property
    def tiles(self) -> int:
        """Of the result, those of a batch together."""
        tile = 2 * self.sizes.get("BLOCK_M", 1) * self.sizes.get("BLOCK_N", 1) * self.k
        return max(1, math.ceil(self.flops / tile))

    @cached_property
    def trips(self) -> dict[Loop, float]:
        """How often loops go round, of those where it is known."""
        products = self.code.product_loops
        known: dict[Loop, float] = {products[-1]: max(self.steps - self.peeled, 0)} if products else {}
        if self.around is not None:
            known[self.around] = math.ceil(self.tiles / self.programs)
        if self.specialized and self.around is not None:
            return known | self._trips_of_warps(known[self.around])
        rounds = self._rounds()
        if rounds is not None:
            known |= {loop: rounds for loop in self.code.loops if loop.depth == 0 and loop not in known}
        return known

    def _trips_of_warps(self, tiles: float) -> dict[Loop, float]:
        """The loop in which warps find their work, one to load and one to multiply, is one warp's."""
        others = [loop for loop in self.code.loops if loop not in self.code.product_loops]
        rounds = {loop: tiles if loop.depth < 2 else self.steps for loop in others}
        return rounds | dict.fromkeys(self.code.product_loops[:-2], 1 / self.warps)

    def _rounds(self) -> float | None:
        """Of a loop without products: over a reduction, over the rows of a program, or over K."""
        for extent, block in (("r0_numel", "R0_BLOCK"), ("RSPLIT_SIZE", "XBLOCK"), ("K", "BLOCK_K")):
            if extent in self.sizes and block in self.sizes:
                return math.ceil(self.sizes[extent] / self.sizes[block])
        return None

    @cached_property
    def understood(self) -> bool:
        return all(loop in self.trips for loop in self.code.loops)

    @cached_property
    def instructions(self) -> float:
        """That a warp issues."""
        return self.code.issued(self.trips)

    @cached_property
    def issue_us(self) -> float:
        slots = ISSUE * self.target.issue_rate * self.target.processors
        return self.programs * self.warps * self.instructions / (slots * _cycles_of_us(self.target))

    @cached_property
    def latency_us(self) -> float:
        turns = math.ceil(self.programs / (self.target.processors * self.resident))
        return turns * self.code.round_trips(self.trips) * LATENCY_US

    @cached_property
    def mma_us(self) -> float:
        if self.steady is None:
            return self.flops / (self._tflops * 1e6) if self.binary.mma else 0.0
        tiles = math.ceil(self.tiles / min(self.programs, self.target.processors))
        busy_us = (self.tile_cycles + self.between_cycles) / _cycles_of_us(self.target)
        waited_us = self.steps * self.code.waits(self.steady) * LATENCY_US if self.resident == 1 else 0.0
        return tiles * (busy_us + waited_us)

    @property
    def _tflops(self) -> float:
        peak = _peak(self.target)
        scaled = any("scale" in name for name in self.binary.mma)
        return MMA * (peak.mxfp8_tflops if scaled else peak.bf16_tflops)

    @cached_property
    def tile_cycles(self) -> float:
        """That the products of a tile take."""
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        operations = 2 * self.steps * math.prod(self.sizes.get(name, 1) for name in names)
        return operations * self.target.processors * _cycles_of_us(self.target) / (self._tflops * 1e6)

    @cached_property
    def between_cycles(self) -> float:
        """From a tile's last product to the next one's first, where nothing else is on the processor."""
        if self.resident > 1 or self.steady is None:
            return 0.0
        steps = 1 + self.peeled
        issued = self.code.issued({}, self.around) - steps * self.code.issued({}, self.steady)
        barriers = self.code.barriers(self.around) - steps * self.code.barriers(self.steady)
        if self.specialized:
            return max(issued, 0) / ISSUE + self._uncovered_cycles()
        issued, barriers = max(issued, 0), max(barriers, 0)
        return issued * self.warps / (ISSUE * self.target.issue_rate) + barriers * BARRIER_CYCLES

    def _uncovered_cycles(self) -> float:
        """Of storing a tile, what the products of the next do not cover; all of it without room for two."""
        outside = [
            loop for loop in self.code.loops if loop.depth == 0 and loop not in self.code.product_loops
        ]
        issued = max((self.code.issued({}, loop) for loop in outside), default=0.0)
        barriers = max(map(self.code.barriers, outside), default=0)
        stored = issued * self.warps / (ISSUE * self.target.issue_rate) + barriers * BARRIER_CYCLES
        two = 2 * self.sizes.get("BLOCK_N", 0) < self.target.tmem_columns
        return max(stored - self.tile_cycles, 0.0) if two else stored

    @cached_property
    def per_element(self) -> float | None:
        elements = self.sizes.get("M", 0) * self.sizes.get("N", 0)
        casts = "BLOCK_M" in self.sizes and not any(each.multiplies for each in self.code.instructions)
        threads = self.programs * self.warps * self.target.warp_size
        return self.instructions * threads / elements if elements and casts else None


def _programs(source: str, sizes: Mapping[str, int], numbers: tuple[int, ...]) -> int:
    """Blocks of the launch; 0 if the kind of grid is not known."""
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


def _peak(target: Target) -> Peak:
    assert target.peak is not None, f"{target.name} has no peaks"
    return target.peak


def _cycles_of_us(target: Target) -> float:
    return _peak(target).clock_ghz * 1e3


def _memory_us(num_bytes: float, target: Target) -> float:
    return num_bytes / (MEMORY * _peak(target).bandwidth_gbs * 1e3)
