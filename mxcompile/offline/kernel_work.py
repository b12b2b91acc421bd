"""The work of a generated kernel, read from its machine code; `estimate` turns the work into times.

    issue      programs · warps · instructions, each as often as its loops go round
    mma        tiles of a processor · operations of a tile, and what it waits for, and what runs between two
    shared     what the matrix units of tensor memory read from shared memory, and loads write there
    latency    turns · batches of loads

Programs take turns where registers, shared or tensor memory hold fewer than there are. Copies into shared
memory that are waited for n steps after they began count 1/n; those of the tensor memory accelerator count
nothing. Where the assembler wrote several rounds of a loop out, as its loads tell, it goes round less often.

A program that has its processor for itself does not multiply while it waits, in a step along K, for what that
step began to load; and between two tiles it does what is outside of its loop over K: instructions, and
`BARRIER_CYCLES` for each barrier. Where warps specialise, one loads, one multiplies, and the others store a
tile while the next is computed if tensor memory has room for two: of that only what takes longer than a
tile's products is between.

The matrix units of tensor memory read both operands of each tile from shared memory, which has as many bytes
a cycle for them as for the loads that fill it. A tile of 128×128 reads all that there are. Sources count K in
bytes, of which a packed operand's hold two elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcompile.formats import BLOCK
from mxcompile.lowering.chips.peak import Peak
from mxcompile.lowering.targets import Target
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import Work
from mxcompile.offline.machine_code import Loop, MachineCode, parse

_SUSTAINED_ISSUE, _SUSTAINED_MMA = 0.6, 0.8
"""Shares of issue slots and matrix units by which work that overlaps is weighed against each other."""

BARRIER_CYCLES = 30
"""That a barrier of a block costs beside the instructions."""

SHARED_BYTES = 128
"""That shared memory of a processor moves in a cycle."""

_FP4 = ("kind::mxf4", "cbsz:4 blgp:4")
"""In the names of instructions that multiply packed FP4; other scaled ones multiply FP8."""

_NUMBER = re.compile(r"^ +(\w+)(?: ?: tl\.constexpr)? = (\d+)$", re.MULTILINE)
_SPECIALIZED = "WARP_SPECIALIZE : tl.constexpr = True"
_GRID = re.compile(r"'grid_type': '(\w+)'")
_BLOCKS_OF_A_PROCESSOR = 32
_FEW_BLOCKS = 2
"""On a processor that wait for the same: of more, one works while another waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts that are read of a launched kernel.

    work: for `estimate`. programs: blocks launched. resident: of them a processor holds at once.
    instructions: a warp issues. per_element: instructions of a thread by elements it casts, of a cast alone.
    between: time between two tiles over a tile's own. barriers, waits: of one step along K, waits for what
    the same step began to load. understood: whether it is known how often every loop goes round, and what is
    launched; if not, such a loop counts once.
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
    """Returns the facts of a generated kernel. numbers: of its launch, the grid last if it is given."""
    sizes = {name: int(value) for name, value in _NUMBER.findall(source)}
    sizes |= {name: value for name, value in binary.settings.items() if isinstance(value, int)}
    code = parse(binary.text.get("sass") or binary.text.get("amdgcn", ""))
    programs = _programs(source, sizes, numbers)
    if not programs or not code.instructions:
        return Facts(work=Work(num_bytes=num_bytes), understood=False)
    launched = _Launched(code, sizes, flops, programs, binary, target, _SPECIALIZED in source)
    tiles = launched.tiles_of_a_processor
    cycles = _cycles_of_us(target)
    issued, barriers = launched.between
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
            round_trips=launched.turns * code.round_trips(launched.trips),
            serial=launched.serial,
        ),
        programs=programs,
        resident=launched.resident,
        instructions=launched.instructions,
        per_element=launched.per_element,
        between=launched.between_cycles / launched.busy_cycles if launched.steady else None,
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
        """The length of K of a tile; the mean, where programs read on the device which part is theirs."""
        area = math.prod(self.sizes.get(name, 1) for name in ("BLOCK_M", "BLOCK_N"))
        results = self.sizes.get("NUM_GROUPS", 0) * math.prod(
            math.ceil(self.sizes.get(side, 0) / self.sizes.get(f"BLOCK_{side}", 1)) for side in "MN"
        )
        bytes_ = self.sizes.get("K", 0)
        return self._packed * bytes_ or max(1.0, self.flops / (2 * area * (results or self.programs)))

    @cached_property
    def steps(self) -> int:
        """Along K."""
        return math.ceil(self.k / (self._packed * self.sizes.get("BLOCK_K", 1)))

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
        """The number of tiles of the result, of all matrices of a batch together."""
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
            rounds /= self._written_out
            known |= {loop: rounds for loop in self.code.loops if loop.depth == 0 and loop not in known}
        return known

    def _trips_of_warps(self, tiles: float) -> dict[Loop, float]:
        """The loop in which warps find their work, one to load and one to multiply, is one warp's."""
        others = [loop for loop in self.code.loops if loop not in self.code.product_loops]
        rounds = {loop: tiles if loop.depth < 2 else self.steps for loop in others}
        return rounds | dict.fromkeys(self.code.product_loops[:-2], 1 / self.warps)

    def _rounds(self) -> float | None:
        """Returns the rounds of a loop without products: over rows, over a reduction, or over K."""
        for extent, block in (("RSPLIT_SIZE", "XBLOCK"), ("r0_numel", "R0_BLOCK"), ("K", "BLOCK_K")):
            if extent in self.sizes and block in self.sizes:
                return math.ceil(self.sizes[extent] / self.sizes[block])
        return None

    @property
    def _written_out(self) -> int:
        """Rounds of a loop in the source that are one round in the machine code."""
        before = parse(self.binary.text.get("ptx", "")).loads_in_loops
        return max(1, self.code.loads_in_loops // before) if before else 1

    @cached_property
    def understood(self) -> bool:
        return all(loop in self.trips for loop in self.code.loops)

    @cached_property
    def serial(self) -> bool:
        """Whether whole blocks, few on a processor, wait in every round of a loop without products."""
        loops = [loop for loop in self.code.loops if self.trips.get(loop, 1) > 1]
        waits = not self.code.product_loops and any(map(self.code.barriers, loops))
        return waits and self.resident <= _FEW_BLOCKS

    @cached_property
    def instructions(self) -> float:
        """The number of instructions that a warp issues."""
        return self.code.issued(self.trips)

    @cached_property
    def issue_us(self) -> float:
        """If every slot were used."""
        slots = self.target.issue_rate * self.target.processors
        return self.programs * self.warps * self.instructions / (slots * _cycles_of_us(self.target))

    @cached_property
    def turns(self) -> int:
        """The number of turns in which the programs run, one after the other."""
        return math.ceil(self.programs / (self.target.processors * self.resident))

    @cached_property
    def tiles_of_a_processor(self) -> int:
        return math.ceil(self.tiles / min(self.programs, self.target.processors)) if self.steady else 0

    @cached_property
    def mma_us(self) -> float:
        """At the data sheet's rate."""
        if self.steady is None:
            return self.flops / (self._tflops * 1e6) if self.binary.mma else 0.0
        return self.tiles_of_a_processor * self.tile_cycles / _cycles_of_us(self.target)

    @cached_property
    def shared_us(self) -> float:
        """The time of operands in shared memory, written by loads and read by the matrix units."""
        if self.steady is None or not self.target.tmem_columns:
            return 0.0
        sides = self.sizes.get("BLOCK_M", 1) + self.sizes.get("BLOCK_N", 1)
        scale = 1 / self.sizes.get("BLOCK", BLOCK)
        read = sides * self.k * ((1 + scale) / self._packed if self._scaled else 2)
        cycles = 2 * read / SHARED_BYTES
        return self.tiles_of_a_processor * cycles / _cycles_of_us(self.target)

    @cached_property
    def waits(self) -> int:
        """The waits of a tile for loads of its steps along K, where nothing else is on the processor."""
        alone = self.steady is not None and self.resident == 1
        return self.steps * self.code.waits(self.steady) if alone and self.steady else 0

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
        """Elements in a byte of the operands."""
        return 2 if any(each in name for name in self.binary.mma for each in _FP4) else 1

    @property
    def _tflops(self) -> float:
        peak = _peak(self.target)
        if self._packed > 1:
            return peak.fp4_tflops
        return peak.mxfp8_tflops if self._scaled else peak.bf16_tflops

    @cached_property
    def tile_cycles(self) -> float:
        """The cycles of the products of a tile at the data sheet's rate."""
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        tile = math.prod(self.sizes.get(name, 1) for name in names) * self._packed
        operations = 2 * self.steps * tile
        return operations * self.target.processors * _cycles_of_us(self.target) / (self._tflops * 1e6)

    @cached_property
    def between(self) -> tuple[float, float]:
        """From a tile's last product to the next one's first, where nothing else is on the processor.

        Returns cycles of instructions that use every slot they can, and barriers.
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
    def between_cycles(self) -> float:
        """The same as cycles, at the sustained rate of issue."""
        issued, barriers = self.between
        return issued / _SUSTAINED_ISSUE + barriers * BARRIER_CYCLES

    @property
    def busy_cycles(self) -> float:
        """The cycles of the products of a tile at the sustained rate."""
        return self.tile_cycles / _SUSTAINED_MMA

    def _uncovered_cycles(self) -> float:
        """Returns the cycles of a tile's store that the next tile's products do not cover.

        They cover none where tensor memory has no room for two accumulators.
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
