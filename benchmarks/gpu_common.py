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
from mxcompile.formats import Copy, Format, ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.chips.target import Peak
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import Target
from mxcompile.offline import Rates

DEVICE = "cuda"
LAYERS = {
    "llama-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(N, K) of the fused QKV, attention output, fused gate and up, and down projections."""
_L2_BYTES = 256 << 20

Call = Callable[[], Any]
Operand = tuple[Tensor, Tensor]
"""Qdata [rows, K] and its scale."""


class WrongError(Exception):
    """A result differs from the reference."""


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of all GPU benchmarks. options: further defaults, by name."""
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
    """Writes a row for each measurement of `programs`, or with ``--compile`` for the code of each program.

    programs: returns the programs for the name of a target. Without a GPU and ``--compile`` it prints a line
    and measures nothing. An error in a program becomes a row, and the exit status 1.
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
    """Yields the rows of a program, or a row with its error, so that other programs still run.

    Raises an error if the device is lost, because no further program can run on it.
    """
    try:
        yield from rows()
    except Exception as error:  # a compile or a kernel can raise any error
        traceback.print_exc()
        words = str(error).strip().splitlines() or [""]
        yield {**program.about, "wrong": f"{type(error).__name__}: {words[0]}"}
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def here() -> Target:
    """Returns the target of this machine's GPU."""
    return targets.of_device(torch.device("cuda"))


def register() -> None:
    """Registers mxcompile's lowerings in Inductor. Raises `SystemExit` if the target cannot run them."""
    if obstacles := pipeline.obstacles(here()):
        raise SystemExit("; ".join(obstacles))


def graph_times(runs: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, float]:
    """Returns the median µs of one call of each run. The calls of a run differ only in their operands."""
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
    """Returns the median device time of each run in µs, alternating, after two rounds of warm-up."""
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
    """Returns the number of copies (2 to 16) of `num_bytes` of operands that exceed the L2 cache."""
    return max(2, min(16, _L2_BYTES // max(num_bytes, 1)))


def check_bits(result: Tensor, wanted: Tensor, label: str) -> None:
    """Raises `WrongError` unless `result` and `wanted` are equal bit by bit."""
    if not torch.equal(result.view(torch.uint8), wanted.view(torch.uint8)):
        raise WrongError(f"{label}: differs from the reference")


def check_product(out: Tensor, a: Tensor, b: Tensor, label: str) -> None:
    """Raises `WrongError` if the error of `out`, `a` [M, K] · `b` [N, K]ᵀ, exceeds FP32 accumulation's."""
    lhs, rhs, k = a.double(), b.double().t(), a.shape[1]
    exact, magnitude = lhs @ rhs, lhs.abs() @ rhs.abs()
    bound = (k + 2) * 2.0**-24 * magnitude + torch.finfo(out.dtype).eps / 2 * exact.abs()
    worst = ((out.double() - exact).abs() / bound.clamp(min=1e-300)).max().item()
    if not worst <= 1.0:
        raise WrongError(f"{label}: error is {worst:.3g} times what accumulation explains")


def quantized(rows: int, k: int, count: int, scales: ScaleLayout) -> tuple[list[Tensor], list[Operand]]:
    """Returns `count` random BF16 matrices [rows, k], and their MXFP8 casts along k."""
    dense = [torch.randn(rows, k, device=DEVICE).bfloat16() for _ in range(count)]
    copies = [str(Copy(format=Format(), layout=scales))]
    return dense, [ops.cast(matrix, copies) for matrix in dense]


def values(operand: Operand) -> Tensor:
    """Returns the dequantized operand, FP64 [rows, K]."""
    result: Tensor = ops.decode(*operand, -1, "e4m3 1x32 rceil", torch.float64)
    return result


def row(about: Row, times: Mapping[str, float], baseline: str) -> Row:
    """Returns a row with the µs of the kernel in `about` and of the baseline. baseline: description of it."""
    time = times[about["kernel"]]
    return {
        **about,
        "time_us": round(time, 2),
        "baseline": baseline,
        "baseline_us": round(times["baseline"], 2),
        "ratio": round(times["baseline"] / time, 3),
    }


def rate(time_us: float, peak: Peak | None, *, flops: float, precision: str) -> dict[str, Any]:
    """Returns TFLOP/s and their share of the data sheet's peak for "mxfp8", "fp8" or "bf16"."""
    tflops = flops / time_us / 1e6
    most = peak.tflops(precision) if peak else 0.0
    return {"tflops": round(tflops, 1), "of_peak": round(tflops / most, 3) if most else None}


def bandwidth(time_us: float, peak: Peak | None, num_bytes: float) -> dict[str, Any]:
    """Returns the bandwidth in 10⁹ bytes per second, and its share of the data sheet's."""
    gbs = num_bytes / time_us / 1e3
    return {"gbs": round(gbs), "of_peak": round(gbs / peak.bandwidth_gbs, 3) if peak else None}


@functools.cache
def device() -> Row:
    """Returns the name of the GPU, and the clocks and power limit that nvidia-smi reports."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader", "-i", "0"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = "unknown"
    return {"gpu": torch.cuda.get_device_name(), "clocks": clocks}
