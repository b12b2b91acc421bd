"""Code that GPU benchmarks share: run programs, time, compare with a reference, name the device."""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import common
import gpu_predicted
import torch
from gpu import NO_DEVICE, ROWS
from gpu_predicted import CompiledProgram, Program, Row
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import Copy, ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.chips.peak import Peak
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import Target
from mxcompile.offline import Rates

DEVICE = "cuda"
LAYERS = {
    "llama-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(N, K) of fused QKV, attention projection, fused gate and up, down."""
_L2_BYTES = 256 << 20

Call = Callable[[], Any]
Operand = tuple[Tensor, Tensor]
"""Codes [rows, K] and their scale."""


class WrongError(Exception):
    """A result is not what the reference says."""


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """What every benchmark takes. options: beside ``--repeats``, defaults by name."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--repeats", type=int, default=10, help="timed rounds")
    result.add_argument("--rates", help="a file of gpu_rates.py, by which estimates are reckoned")
    result.add_argument(
        "--compile", metavar="CHIP", help="time nothing; compile for h100, sm_90, … without it"
    )
    result.add_argument("--small", action="store_true", help="few, small sizes: to try the script")
    result.set_defaults(**options)
    return result


def run(options: argparse.Namespace, programs: Callable[[str], Iterable[Program]]) -> None:
    """Write a row for each measurement of `programs`, or of their code for a chip that is not here.

    programs: of a target. Where there is neither, it says so. What goes wrong with a program is its row, and
    the exit status 1.
    """
    if options.compile:
        chip = options.compile
        table = (
            attempt(program, lambda program=program: [program.compiled(chip)])
            for program in programs(targets.check(chip))
            if isinstance(program, CompiledProgram)
        )
        name = gpu_predicted.NAME
    elif not torch.cuda.is_available():
        print(f"skipped, {NO_DEVICE} here; nothing was measured")
        return
    else:
        name = ROWS
        register()
        rates = Rates.for_target(here(), options.rates)
        table = (
            attempt(program, lambda program=program: program.measure(rates, options.repeats))
            for program in programs(rates.target.name)
        )
    about = {} if options.compile else device()
    rows = common.write(name, (row | about for of_program in table for row in of_program))
    common.show([{key: value for key, value in row.items() if key not in _NOT_SHOWN} for row in rows])
    if any("wrong" in row for row in rows):
        sys.exit(1)


_NOT_SHOWN = ("works", "choices", "gpu", "clocks")


def attempt(program: Program, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows; an error is a row as well, and ends none but its program.

    Raises it if the device is lost, on which nothing runs any more.
    """
    try:
        yield from rows()
    except Exception as error:  # whatever a compile or a kernel meets
        traceback.print_exc()
        words = str(error).strip().splitlines() or [""]
        yield {**program.about, "wrong": f"{type(error).__name__}: {words[0]}"}
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def here() -> Target:
    """The GPU of this machine."""
    return targets.of_device(torch.device("cuda"))


def register() -> None:
    """Make Inductor lower the operators as graphs of the backend have them lowered."""
    if obstacles := pipeline.obstacles(here()):
        raise SystemExit("; ".join(obstacles))


def graph_times(runs: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, float]:
    """Median time of one call of each run in µs; the calls of a run differ only in their operands."""
    graphs = {}
    for name, calls in runs.items():
        for call in calls[:1]:
            call()  # compiles, before the capture
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    times = alternate({name: graph.replay for name, graph in graphs.items()}, repeats)
    return {name: time / len(runs[name]) for name, time in times.items()}


def alternate(runs: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median time of each run in µs on the device, taken in turns, two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def copies_for(num_bytes: int) -> int:
    """How many copies of operands of that size are several times the L2 cache, at most 16."""
    return max(2, min(16, _L2_BYTES // max(num_bytes, 1)))


def check_bits(result: Tensor, wanted: Tensor, label: str) -> None:
    """Casts have no tolerance."""
    if not torch.equal(result.view(torch.uint8), wanted.view(torch.uint8)):
        raise WrongError(f"{label}: differs from the reference")


def check_product(out: Tensor, a: Tensor, b: Tensor, label: str) -> None:
    """A product of `a` [M, K] and `b` [N, K], exact values: FP32 accumulation and one rounding."""
    lhs, rhs, k = a.double(), b.double().t(), a.shape[1]
    exact, magnitude = lhs @ rhs, lhs.abs() @ rhs.abs()
    bound = (k + 2) * 2.0**-24 * magnitude + torch.finfo(out.dtype).eps / 2 * exact.abs()
    worst = ((out.double() - exact).abs() / bound.clamp(min=1e-300)).max().item()
    if not worst <= 1.0:
        raise WrongError(f"{label}: error is {worst:.3g} times what accumulation explains")


def quantized(rows: int, k: int, count: int, scales: ScaleLayout) -> tuple[list[Tensor], list[Operand]]:
    """BF16 matrices [rows, k], and the same quantized along k."""
    dense = [torch.randn(rows, k, device=DEVICE).bfloat16() for _ in range(count)]
    how = (torch.float8_e4m3fn, "rceil", False, str(scales))
    return dense, [ops.cast(matrix, [str(Copy.mx(-1, *how))]) for matrix in dense]


def values(operand: Operand) -> Tensor:
    """FP64 [rows, K]."""
    result: Tensor = ops.decode(*operand, -1, "e4m3 1x32 rceil", torch.float64)
    return result


def row(about: Row, times: Mapping[str, float], baseline: str) -> Row:
    """What the kernel of `about` took in µs, beside the run called "baseline" and what that is."""
    time = times[about["kernel"]]
    return {
        **about,
        "time_us": round(time, 2),
        "baseline": baseline,
        "baseline_us": round(times["baseline"], 2),
        "ratio": round(times["baseline"] / time, 3),
    }


def rate(time_us: float, peak: Peak | None, *, flops: float, precision: str) -> dict[str, Any]:
    """10¹² operations a second, and their share of what the data sheet has for "mxfp8", "fp8" or "bf16"."""
    tflops = flops / time_us / 1e6
    most = getattr(peak, f"{precision}_tflops", 0.0)
    return {"tflops": round(tflops, 1), "of_peak": round(tflops / most, 3) if most else None}


def bandwidth(time_us: float, peak: Peak | None, num_bytes: float) -> dict[str, Any]:
    """10⁹ bytes a second, and their share of the data sheet's."""
    gbs = num_bytes / time_us / 1e3
    return {"gbs": round(gbs), "of_peak": round(gbs / peak.bandwidth_gbs, 3) if peak else None}


@functools.cache
def device() -> Row:
    """Name and clocks of the GPU, as far as the driver's tool tells."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader", "-i", "0"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = "unknown"
    return {"gpu": torch.cuda.get_device_name(), "clocks": clocks}
