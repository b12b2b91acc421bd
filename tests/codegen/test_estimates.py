"""Estimates from machine code: times as by hand, and the costs of generated kernels."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from helpers.casts import casts_both
from test_machine_code import NVIDIA

from mxcompile.cli.main import main
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import kernel_work
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import library_work, total
from mxcompile.offline.launch import KINDS
from mxcompile.offline.machine_code import parse
from mxcompile.offline.rates import Rates
from mxcompile.versions import newer

ROOT = Path(__file__).parents[2]
NEWER = newer("triton", "3.7")
"""Whether Triton makes other machine code: barriers of its own, and norms with one more instruction."""


SOURCE = """
    'grid_type': 'FixedGrid'
    BLOCK_M : tl.constexpr = 128
    BLOCK_N : tl.constexpr = 256
    BLOCK_K : tl.constexpr = 128
    M = 1024
    N = 1024
"""


PLAIN = Rates.for_target(TARGETS["sm_100"])
PLAIN = dataclasses.replace(
    PLAIN,
    values={"memory": 0.875, "issue": 0.6, "own_mxfp8": 0.8, "mxfp8": 0.8, "bf16": 0.8}
    | {"latency_us": 0.7, "launch_us": 0.0},
)


def _binary(sass, *, ptx="", **changed):
    """A kernel of eight warps whose machine code is `sass`."""
    values = {"settings": {"num_warps": 8}, "registers": 64, "text": {"sass": sass, "ptx": ptx}}
    return Binary(**values | changed)


def _product(sass, **changed):
    """The same of a kernel that multiplies, alone on its processor."""
    return _binary(sass, **{"shared_bytes": 200_000, "mma": ("tcgen05.mma.block_scale",)} | changed)


def _facts(**changed):
    values = {
        "num_bytes": 7_000_000,
        "flops": 2.0 * 1024**2 * 512,
        "source": SOURCE + "    K = 512\n",
        "numbers": (16, 1, 1),
        "binary": _product(NVIDIA),
        "target": TARGETS["sm_100"],
    }
    return kernel_work.read(**values | changed)


COPIES = """
.text.kernel:
        /*0000*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0010*/                   LDGDEPBAR ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R9+0x1000], desc[UR4][R2.64] ;
        /*0030*/                   LDGDEPBAR ;
.L_x_0:
        /*0040*/                   DEPBAR.LE SB0, 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R32, R16, R12, R32, R15, R14, URZ ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R9+0x2000], desc[UR4][R2.64], !P1 ;
        /*0080*/                   LDGSTS.E.BYPASS.128 [R9+0x3000], desc[UR4][R2.64], !P1 ;
        /*0090*/                   LDGDEPBAR ;
        /*00a0*/               @P0 BRA `(.L_x_0) ;
        /*00b0*/                   DEPBAR.LE SB0, 0x0 ;
        /*00c0*/                   EXIT ;
"""
SCALES = """
        /*0050*/                   LDG.E.U8 R15, desc[UR4][R2.64] ;
        /*0050*/                   PRMT R14, R15, 0x8880, RZ ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
"""


@pytest.mark.parametrize(
    ("text", "each_step", "waits"),
    [
        (COPIES, 1 / 2, 0),
        (COPIES.replace("SB0, 0x1", "SB0, 0x0"), 1, 1),
        (COPIES.replace("        /*0050*/", SCALES, 1), 1 + 1 / 2, 1),
    ],
    ids=["two steps ahead", "of the same step", "scales loaded where they are used"],
)
def test_copies_into_shared_memory_wait_once_per_step(text, each_step, waits):
    """They fill no registers: the address that two have in common waits for none of them.

    A program alone on its processor multiplies nothing while it waits for what its step has begun to load.
    """
    code = parse(text)
    (loop,) = code.product_loops
    assert code.round_trips({loop: 8}) == 8 * each_step + 1
    assert code.waits(loop) == waits
    alone, two = (_facts(binary=_product(text, shared_bytes=shared)) for shared in (200_000, 100_000))
    assert (alone.resident, two.resident) == (1, 2)
    assert alone.waits == waits
    assert alone.work.waits == 2 * 4 * waits, "of two tiles of four steps"
    assert two.work.waits == 0
    tile = two.work.estimate(PLAIN).mma_us / 2
    between = alone.between * alone.work.mma_us / 2 / 0.8
    assert alone.work.estimate(PLAIN).mma_us == pytest.approx(2 * (tile + between + 4 * waits * 0.7))


@pytest.mark.parametrize(("registers", "blocks"), [(40, 6), (41, 5), (255, 1)])
def test_blocks_share_the_registers_of_a_processor(registers: int, blocks: int):
    """65,536 of them, given to the 256 threads of a block by eights: 41 take 48."""
    assert _facts(binary=_binary(NVIDIA, registers=registers)).resident == blocks


def test_the_four_times_by_hand():
    """32 tiles on 16 programs, two each, of four steps along K."""
    facts = _facts()
    assert facts.understood
    assert (facts.programs, facts.resident) == (16, 1)
    estimate = facts.work.estimate(PLAIN)
    assert estimate.memory_us == pytest.approx(1.0), "at 7 TB/s"
    instructions = 3 + 2 * (7 + 4 * 3) + 2
    assert facts.instructions == instructions
    assert estimate.issue_us == pytest.approx(16 * 8 * instructions / (2.4 * 148 * 1850))
    tile = 2 * 128 * 256 * 512 / (0.8 * 4500e12 / 148) * 1e6
    shared = 2 * (128 + 256) * 512 * 33 / 32 / 128 / 1850
    between = (7 * 8 / 2.4 + 30) / 1850
    assert shared > tile, "what the matrix units read and loads write, at 128 bytes a cycle"
    assert estimate.mma_us == pytest.approx(2 * (shared + between))
    assert facts.between == pytest.approx(between / tile)
    assert estimate.latency_us == pytest.approx(3 * 0.7)
    assert (estimate.us, estimate.by) == (estimate.mma_us, "mma")


def test_shared_memory_feeds_tensor_memorys_units_alone():
    """A tile of 128×128 needs four cycles for two of products; other chips keep operands nearer."""
    square = SOURCE.replace("BLOCK_N : tl.constexpr = 256", "BLOCK_N : tl.constexpr = 128") + "    K = 512\n"
    work = _facts(source=square).work
    assert work.shared_us / work.mma_us == pytest.approx(2.07, rel=0.01)
    wide = _facts().work
    assert wide.shared_us / wide.mma_us == pytest.approx(1.55, rel=0.01)
    assert _facts(target=TARGETS["sm_120"]).work.shared_us == 0.0


def test_groups_along_k_share_it():
    """Two groups of 32 tiles, whose ends are read on the device: on average half of K, two steps, each."""
    whole = _facts().work.estimate(PLAIN)
    facts = _facts(source=SOURCE, numbers=(64, 1, 1))
    assert facts.understood
    assert facts.instructions == 3 + 7 + 2 * 3 + 2
    part = facts.work.estimate(PLAIN)
    tile = 2 * (128 + 256) * 256 * 33 / 32 / 128 / 1850
    assert part.mma_us == pytest.approx(tile + (7 * 8 / 2.4 + 30) / 1850), "a tile on each of 64 processors"
    assert part.mma_us < whole.mma_us
    persistent = _facts(source=f"{SOURCE}    NUM_GROUPS : tl.constexpr = 2\n", numbers=(16, 1, 1)).work
    assert persistent.estimate(PLAIN).mma_us == pytest.approx(4 * part.mma_us), "64 tiles on 16 processors"


@pytest.mark.parametrize("products", [True, False], ids=["products", "sums"])
def test_each_part_of_k_takes_its_share_of_the_steps(products):
    """K of 512 in four parts: one step of 128 each, four times as many programs."""
    flops = 2.0 * 1024**2 * 512 if products else 0.0
    values = {"binary": _binary(NVIDIA if products else ROWS), "flops": flops}
    source = SOURCE + "    K = 512\n"
    whole = _facts(source=source, numbers=(32, 1, 1), **values)
    parts = _facts(source=source + "    PARTS : tl.constexpr = 4\n", numbers=(32, 4, 1), **values)
    assert parts.understood
    assert whole.instructions - parts.instructions == 3 * (3 if products else 5), "three steps less"
    assert parts.programs == 4 * whole.programs


ROWS = """
.text.kernel:
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   FADD R6, R6, R4 ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   STG.E.128 desc[UR4][R8.64], R6 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""
MIXED = """
    'grid_type': 'MixOrderReductionGrid'
    xnumel = 4096
    r0_numel = 4096
    R0_BLOCK: tl.constexpr = 4096
"""


def _rows(sass, **changed):
    """The facts of a kernel with 16 rows a program."""
    settings = {"num_warps": 8, "XBLOCK": 1, "RSPLIT_SIZE": 16}
    return _facts(source=MIXED, binary=_binary(sass, settings=settings, **changed), flops=0.0, numbers=())


def test_rows_that_a_block_reduces_one_after_the_other():
    """Every round waits for the block, and nothing runs beside it."""
    facts = _rows(ROWS, registers=128)
    assert facts.understood
    assert (facts.programs, facts.instructions) == (256, 16 * 5 + 1)
    assert (facts.work.round_trips, facts.work.serial) == (16, True)
    estimate = facts.work.estimate(PLAIN)
    assert estimate.us == pytest.approx(estimate.memory_us + estimate.issue_us + estimate.latency_us)
    assert not _rows(ROWS.replace("BAR.SYNC", "MOV")).work.serial


@pytest.mark.parametrize(("registers", "blocks", "serial"), [(128, 2, True), (80, 3, False)])
def test_blocks_beside_each_other_do_not_wait_for_each_other(registers, blocks, serial):
    facts = _rows(ROWS, registers=registers)
    assert (facts.resident, facts.work.serial) == (blocks, serial)


PTX = """
.visible .entry kernel()
{
	ld.param.b64 	%rd1, [kernel_param_0];
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	// begin inline asm
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	// end inline asm
	@%p2 bra 	$L__BB0_1;
	ret;
}
"""


@pytest.mark.parametrize(("written_out", "rounds"), [(1, 16), (2, 8), (4, 4)])
def test_rounds_that_the_assembler_writes_out(written_out, rounds):
    """A round of its loop is then several of the source's, as its loads tell."""
    load = "        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n"
    loads = "".join(load.replace("R4", f"R{4 + 8 * at}") for at in range(written_out))
    facts = _rows(ROWS.replace(load, loads), ptx=PTX)
    assert facts.instructions == rounds * (4 + written_out) + 1
    assert facts.work.round_trips == rounds


SPECIALIZED = """
.text.kernel:
        /*0000*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_0:
        /*0010*/                   LDS R4, [R3] ;
.L_x_1:
        /*0020*/                   UMOV UR4, UR5 ;
.L_x_2:
        /*0030*/                   UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR16], idesc[UR17] ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   UMOV UR4, UR5 ;
.L_x_4:
        /*0070*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0080*/              @!P0 BRA `(.L_x_4) ;
        /*0090*/              @!P0 BRA `(.L_x_3) ;
.L_x_5:
        /*00a0*/                   NOP ;
        /*00b0*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP1, 0x100 ;
        /*00c0*/              @!P0 BRA.U `(.L_x_5) ;
        /*00d0*/              @!P0 BRA `(.L_x_0) ;
.L_x_6:
        /*00e0*/                   LDTM.x64 R4, tmem[UR4] ;
        /*00f0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0100*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0110*/              @!P0 BRA `(.L_x_6) ;
        /*0120*/                   EXIT ;
"""


@pytest.mark.parametrize(("block_n", "hidden"), [(128, True), (256, False)])
def test_specialised_warps_hide_stores_behind_a_second_accumulator(block_n, hidden):
    """One multiplies, one loads, the others store; of 256 columns there is no second accumulator."""
    source = f"""
    'grid_type': 'FixedGrid'
    BLOCK_M : tl.constexpr = 128
    BLOCK_N : tl.constexpr = {block_n}
    BLOCK_K : tl.constexpr = 128
    WARP_SPECIALIZE : tl.constexpr = True
    M = 1024
    N = 1024
    K = 512
"""
    facts = _facts(source=source, binary=_product(SPECIALIZED, settings={"num_warps": 4}))
    assert facts.understood
    tiles = 8 * 1024 // block_n // 16
    work = 4 + tiles * (2 + 4 * 2) * 2
    assert facts.instructions == pytest.approx(1 + work / 4 + tiles * 4 + 1)
    cycles = 2 * 128 * block_n * 512 / (0.8 * 4500e12 / 148) * 1850e6
    stored = 0.0 if hidden else 4 * 4 / 2.4 + 30
    assert facts.between == pytest.approx((2 / 0.6 + stored) / cycles)


def test_a_step_that_the_compiler_wrote_out_is_none_between_tiles():
    """The first step beside the loop: three rounds are left to it, and a tile's time stays what it was."""
    step = NVIDIA[NVIDIA.index("        /*0040*/") : NVIDIA.index("        /*0060*/")]
    peeled = NVIDIA.replace(
        ".L_x_1:\n", step + "        /*0060*/               @P0 IADD3 R9, R9, R9, RZ ;\n.L_x_1:\n"
    )
    written_out, plain = _facts(binary=_product(peeled)), _facts()
    assert written_out.instructions == plain.instructions
    assert written_out.between == pytest.approx(plain.between)
    assert written_out.work.estimate(PLAIN).mma_us == pytest.approx(plain.work.estimate(PLAIN).mma_us)


def test_time_between_tiles_is_zero_where_other_programs_fit():
    small = _product(NVIDIA, settings={"num_warps": 4}, shared_bytes=1000)
    assert _facts(binary=small).between == 0.0


def test_estimate_marks_unreadable_kernels_as_not_understood():
    """A loop without products over nothing that the source names, and a grid that nobody can read."""
    plain = NVIDIA.replace("UTCQMMA", "FFMA")
    assert parse(plain).product_loops == ()
    unread = _facts(source="'grid_type': 'SomeOtherGrid'")
    estimate = unread.work.estimate(PLAIN)
    assert (unread.understood, estimate.us) == (False, estimate.memory_us)
    source = "'grid_type': 'Grid1D'\n    xnumel = 4096\n"
    assert not _facts(source=source, binary=_binary(plain), flops=0.0).understood


@pytest.mark.parametrize(("product", "tflops"), [("bf16", 2250), ("mxfp8", 4500)])
def test_a_library_is_bound_by_bytes_and_operations(product, tflops):
    target = TARGETS["sm_100"]
    moved = library_work(num_bytes=7e6, flops=0.0, product=product, target=target).estimate(PLAIN)
    assert (moved.us, moved.by) == (pytest.approx(1.0), "memory")
    multiplied = library_work(num_bytes=0.0, flops=tflops * 0.8e6, product=product, target=target)
    assert multiplied.estimate(PLAIN).us == pytest.approx(1.0)
    assert multiplied.estimate(PLAIN).by == "mma"


@pytest.mark.slow
def test_every_launch_of_a_block_is_understood(generated):
    result = generated("sm_100", True)
    assert result.step.unclear == 0
    assert result.step.launches == len(result.launches)
    assert result.step.us == pytest.approx(sum(launch.estimate.us for launch in result.launches))
    assert result.step.us == pytest.approx(sum(result.step.by_kind.values()))
    text = str(result)
    assert "estimates of the launches, from the machine code" in text
    assert len(re.findall(r" \d+ \(\d+–\d+\) +(?:memory|issue|mma|latency) ", text)) >= 10, "a range each"


@pytest.mark.slow
def test_native_casts_spend_few_instructions_per_element(generated):
    """Instructions by elements: seven terabytes a second leave about 12 to both copies, 18 to SwiGLU's."""
    result = generated("sm_100", True)
    launches = result.launches
    alone = [
        launch.facts.per_element for launch in launches if launch.cast and not casts_both(result, launch)
    ]
    assert len(alone) > 8
    assert 3 < min(alone) <= max(alone) <= 5.5
    both = [launch for launch in launches if casts_both(result, launch)]
    spent = {launch.kernel: launch.facts.per_element for launch in both}
    assert 7 < min(spent.values()) <= 8.6
    assert max(spent.values()) <= (20 if NEWER else 19), "norms and SwiGLU"
    (two,) = (launch for launch in launches if casts_both(result, launch, 2))
    assert two.facts.per_element <= (36 if NEWER else 33)


@pytest.mark.slow
def test_barriers_of_a_step_of_a_product(generated):
    """A step along K waits for its operands and scales, and frees them."""
    result = generated("sm_100", True)
    launches = result.launches
    steps = {launch.facts.barriers for launch in launches if launch.kind == "product" and launch.facts}
    expected = {9, 10} if NEWER else {3, 4, 5}
    assert steps - {None} <= expected, "None is a product of so few steps that they make no loop"
    assert steps != {None}


def test_two_policies_side_by_side(capsys):
    model = "test_codegen_command:factory"
    assert main(["codegen", model, "--target", "sm_90", "--inference", "--compare", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert "estimates on sm_90 from the machine code, not measured" in shown
    row = next(line.split() for line in shown.splitlines() if line.strip().startswith("step, µs"))
    assert len(row) == 6, "centre and (low–high) of two policies"
    assert all(float(cell.replace(",", "")) > 0 for cell in row[2::2])


@pytest.mark.slow
@pytest.mark.skipif(NEWER, reason="the committed prediction is of Triton 3.7")
def test_the_committed_prediction_is_todays(benchmark):
    """A Llama-8B layer for a B200: the newest committed line, within what another Triton may change."""
    predicted = benchmark("predicted")
    lines = [
        json.loads(line) for line in (ROOT / "benchmarks/results/predicted.jsonl").read_text().splitlines()
    ]
    committed = [line for line in lines if (line["target"], line["policy"]) == ("sm_100", "nvidia")][-1]
    result = predicted.generated("sm_100", "nvidia", committed["tokens"])
    today = predicted.row(result)
    assert today["unclear"] == 0
    assert today["launches"] == committed["launches"]
    assert float(predicted.casts_over_memory(committed)) <= 1.25, "casts at the memory's speed, nearly"
    rates = Rates.for_target(TARGETS["sm_100"])
    for kind in KINDS:
        us = [total(predicted.works(row, kind), rates) for row in (committed, {**committed, **today})]
        assert us[1] == pytest.approx(us[0], rel=0.05), kind
    casts = [launch for launch in result.launches if casts_both(result, launch)]
    forward = [cast.facts.per_element for cast in casts if cast.phase == "forward"]
    assert sorted(forward) == pytest.approx([12.5, 13.8, 17.9], rel=0.05), "two norms and SwiGLU"
    alone = {cast.facts.per_element for cast in casts if "aten.mul.Tensor" not in cast.operators}
    assert max(alone) <= 8.6
