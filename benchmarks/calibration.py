"""Compares estimates with published times of kernels: docs/calibration.md and its picture.

A point compares a published kernel time with its estimate by the current rates. ``--compile`` reads the
work of a kernel from its machine code (minutes, no GPU) and writes it to results/calibration.json, from which
pages and tests compute estimates. If only the bytes of a kernel are published, the bytes are its work.
Usage: python benchmarks/calibration.py [--compile] [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.lowering.targets import TARGETS, Target, of_chip
from mxcompile.offline import Rates, Work, codegen
from mxcompile.offline.estimate import total

FILE = common.RESULTS / "calibration.json"
PAGE = common.ROOT / "docs" / "calibration.md"
PICTURE = common.ROOT / "docs" / "images" / "calibration.png"
BEGIN, END = "<!-- calibration: begin -->", "<!-- calibration: end -->"
LOW, HIGH = 0.75, 1.33
"""Bounds of measured ÷ estimate within which a point counts as near."""

STREAM, LOOP, SPLIT, SMALL = "stream", "loop over rows", "split reduction", "few rows"
CAST, PAIRS, TILES, PRODUCT = "cast", "loads of pairs", "loop over tiles", "product"
"""Classes of kernels."""

KNOWN_BAD = {
    LOOP: "a block reduces each of its rows before it takes the next; on an A100 that costs more than the sum"
    " of its parts",
    SPLIT: "a reduction in two kernels; loads that start while others are used count as a wait each",
    PAIRS: "elements of a byte are read apart, each load every second one; that costs more than its slots",
    TILES: "one block of few warps has a processor, whose instructions wait for each other",
    SMALL: "so few rows that a last turn of programs is not full, or that a launch is most of the time",
}
"""Classes whose points may lie outside the bounds, with the reason."""

_LIGER = "Liger-Kernel, benchmark/data/all_benchmark_data.csv"
_CUDNN = "cudnn-frontend, benchmark/norms/results (torch_compile)"
_AO = "torchao, docs/source/workflows/training.md"
_AO_FP4 = "torchao, benchmarks/prototype/nvfp4_training"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published time.

    kind: class of the kernel. kernel, chip, shape: names of the kernel, its GPU and its sizes. measured_us:
    time that `source` published. plus: work of each launch. minus: work of the launches whose time the source
    subtracted.
    """

    kind: str
    kernel: str
    source: str
    chip: str
    shape: str
    measured_us: float
    plus: tuple[Work, ...]
    minus: tuple[Work, ...] = ()

    @property
    def estimate_us(self) -> float:
        """Estimated time in µs by the rates of the chip."""
        rates = rates_of(self.chip)
        return total(self.plus, rates) - total(self.minus, rates)

    @property
    def ratio(self) -> float:
        """Measured ÷ estimate."""
        return self.measured_us / self.estimate_us

    @property
    def is_near(self) -> bool:
        """Whether measured ÷ estimate lies between `LOW` and `HIGH`."""
        return LOW <= self.ratio <= HIGH


_PROCESSORS = {"GB200": 152}
"""SMs of chips that differ from the row of their target."""


def chip(name: str) -> Target:
    """Returns the target of the chip `name`, with its own number of SMs."""
    row = of_chip(name)
    return dataclasses.replace(row, processors=_PROCESSORS.get(name, row.processors))


@functools.cache
def rates_of(name: str) -> Rates:
    """Returns the rates of the chip `name`."""
    return Rates.for_target(chip(name))


def compiled() -> Iterator[Point]:
    """Yields all points, with the kernels of each compiled for its chip."""
    yield from tqdm(_liger(), desc="Liger")
    yield from tqdm(_norms(), desc="norms of Inductor")
    yield from tqdm(_products(), desc="products")
    yield from _casts()
    yield from tqdm(_generated_casts(), desc="casts of torchao")


def _liger() -> Iterator[Point]:
    import calibration_kernels as kernels

    forwards: tuple[tuple[str, str, int, dict[int, float], Any], ...] = (
        (
            *("rms_norm", "A100", 2048, {1024: 13.6, 4096: 31.1, 8192: 51.7, 16384: 95.3, 32768: 182}),
            {"element": "bf16", "operands": 2},
        ),
        (
            *("rms_norm", "H100", 4096, {1024: 12.2, 4096: 29.2, 8192: 50.9, 16384: 95.0}),
            {"element": "bf16", "operands": 2},
        ),
        (
            "layer_norm",
            "A100",
            4096,
            {1024: 30.3, 4096: 88.2, 16384: 322},
            {"element": "fp32", "operands": 2},
        ),
        (
            "layer_norm",
            "H100",
            4096,
            {1024: 18.8, 4096: 51.0, 16384: 185},
            {"element": "fp32", "operands": 2},
        ),
        (
            *(
                "swiglu",
                "H100",
                8192,
                {1024: 23.3, 2048: 39.6, 4096: 72.5, 8192: 137, 16384: 267, 32768: 528},
            ),
            {"element": "bf16", "operands": 3},
        ),
    )
    for name, on, rows, times, how in forwards:
        for width, us in times.items():
            work = kernels.by_rows(getattr(kernels, name), rows, width, **how).work(chip(on))
            yield Point(
                kind=SMALL if us < 20 else STREAM, kernel=f"{name} forward", source=_LIGER, chip=on,
                shape=f"{rows}×{width}", measured_us=us, plus=(work,),
            )  # fmt: skip
    backwards: tuple[tuple[str, str, int, dict[int, float], Any], ...] = (
        ("rms_norm", "A100", 2048, {8192: 178, 16384: 321}, {"element": "bf16", "sums": 1}),
        ("layer_norm", "H100", 4096, {4096: 166, 8192: 313, 16384: 578}, {"element": "fp32", "sums": 2}),
    )
    for name, on, rows, times, how in backwards:
        kernel, target = getattr(kernels, f"{name}_backward"), chip(on)
        works = {
            width: kernels.looping(kernel, rows, width, target.processors, **how).work(target)
            for width in times
        }
        for (less, before), (width, us) in zip(times.items(), list(times.items())[1:], strict=False):
            yield Point(
                kind=LOOP, kernel=f"{name} backward, difference", source=_LIGER, chip=on,
                shape=f"{rows}×({width} − {less})", measured_us=us - before,
                plus=(works[width],), minus=(works[less],),
            )  # fmt: skip


_NORMS: tuple[tuple[str, type[nn.Module], int, int, str, dict[str, float], dict[str, float]], ...] = (
    ("RMSNorm", nn.RMSNorm, 16384, 4096, LOOP, {"GB200": 58, "H200": 76}, {"GB200": 155, "H200": 236}),
    ("RMSNorm", nn.RMSNorm, 8192, 4096, LOOP, {"GB200": 31, "H200": 39}, {"GB200": 83, "H200": 118}),
    ("RMSNorm", nn.RMSNorm, 8192, 8192, SPLIT, {"GB200": 44, "H200": 64}, {"GB200": 163, "H200": 236}),
    ("RMSNorm", nn.RMSNorm, 4096, 16384, SPLIT, {"GB200": 43, "H200": 67}, {"GB200": 127, "H200": 177}),
    ("LayerNorm", nn.LayerNorm, 1024, 12288, SMALL, {"GB200": 17, "H200": 20}, {"GB200": 38, "H200": 43}),
)


def _norms() -> Iterator[Point]:
    for name, module, rows, width, kind, *times in _NORMS:
        for on in times[0]:
            with torch.device("meta"):
                layer = module(width).bfloat16()
                x = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=True)
            works = _generated(layer, x, on)
            for phase, measured in zip(("forward", "backward"), times, strict=True):
                yield Point(
                    kind=STREAM if phase == "forward" and kind != SMALL else kind,
                    kernel=f"{name} {phase} of Inductor", source=_CUDNN, chip=on, shape=f"{rows}×{width}",
                    measured_us=measured[on], plus=works[phase],
                )  # fmt: skip


def _generated(module: nn.Module, x: Tensor, on: str) -> dict[str, tuple[Work, ...]]:
    """Returns the work of the launches of Inductor's code for `module`, by phase. on: name of the chip."""
    target = chip(on)
    with mock.patch.dict(TARGETS, {target.name: target}):
        launches = codegen(module, x, target=target.name, policy="bf16").launches
    works: defaultdict[str, tuple[Work, ...]] = defaultdict(tuple)
    for launch in launches:
        works[launch.phase] += (launch.work,) if launch.work else ()
    return works


def _products() -> Iterator[Point]:
    import calibration_kernels as kernels

    for on, size, us, source, how in (
        ("A100", 3072, 252, "triton #3551", {"element": "fp16", "block_k": 64}),
        ("A100", 2048, 160, "triton #3551", {"element": "fp16", "block_k": 64}),
        ("H100", 3584, 71.9, "triton #3546", {"element": "fp8e4nv", "block_k": 128}),
    ):
        work = kernels.multiplied(size, **how).work(chip(on))  # type: ignore[arg-type]
        if how["element"] == "fp8e4nv":
            work = dataclasses.replace(work, mma_us=work.mma_us * 989 / 1979)
        yield Point(
            kind=PRODUCT, kernel="tutorial 3, 128×256", source=source, chip=on, shape=f"{size}³",
            measured_us=us, plus=(work,),
        )  # fmt: skip


def _casts() -> Iterator[Point]:
    """Yields points of casts whose work is only their bytes."""
    cast = 2 + 1 + 1 / 32
    for kernel, us in (("MXFP8 cast along rows, rceil", 138.2), ("MXFP8 cast along rows, floor", 139.2)):
        yield _by_bytes(kernel, _AO, "B200", 16384**2, cast, us)
    sizes = {512: 2.9, 1024: 3.4, 2048: 5.4, 4096: 12.5, 8192: 38.4, 16384: 136.7}
    for size, us in sizes.items():
        yield _by_bytes("MXFP8 cast of 32×32", "torchao #4777", "B200", size**2, 2 + 1 + 1 / 1024, us)
    yield _by_bytes("MXFP8 to FP16", "triton #11644", "H100", 32768**2, cast, 1281)


def _by_bytes(kernel: str, source: str, on: str, elements: int, width: float, us: float) -> Point:
    side = round(elements**0.5)
    return Point(
        kind=STREAM, kernel=kernel, source=source, chip=on, shape=f"{side}²", measured_us=us,
        plus=(Work(num_bytes=elements * width),),
    )  # fmt: skip


class _Cast(nn.Module):
    def __init__(self, cast: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.cast = cast

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = self.cast(x)
        return scales.view(torch.uint8), codes


def _generated_casts() -> Iterator[Point]:
    """Yields points of torchao's casts: its code under Inductor, a rewritten kernel, its Triton kernel."""
    import calibration_kernels as kernels
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    size = 16384
    x = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
    mode, e4m3 = ScaleCalculationMode, torch.float8_e4m3fn
    for kind, codes, us, source, cast in (
        (CAST, "MXFP8 (floor)", 125.9, _AO, lambda x: to_mx(x, e4m3, 32, scaling_mode=mode.FLOOR)),
        (CAST, "MXFP8 (rceil)", 220.1, _AO, lambda x: to_mx(x, e4m3, 32, scaling_mode=mode.RCEIL)),
        (PAIRS, "NVFP4", 879.7, "pytorch #167098", nvfp4_quantize),
    ):
        yield Point(
            kind=kind, kernel=f"cast of Inductor to {codes}", source=source, chip="B200", shape=f"{size}²",
            measured_us=us, plus=_generated(_Cast(cast), x, "B200")["inference"],
        )  # fmt: skip
    yield Point(
        kind=CAST, kernel="NVFP4 cast along rows", source="pytorch #167098", chip="B200", shape=f"{size}²",
        measured_us=206.8, plus=(kernels.cast_to_nvfp4(size).work(chip("B200")),),
    )  # fmt: skip
    target, rates = chip("GB200"), rates_of("GB200")
    works = [kernel.work(target) for kernel in kernels.casts_of_weights(2048, 28672, target.processors)]
    yield Point(
        kind=TILES, kernel="NVFP4 cast of 16×16, both layouts", source=_AO_FP4, chip="GB200",
        shape="2048×28672", measured_us=232.2, plus=(min(works, key=lambda work: work.estimate(rates).us),),
    )  # fmt: skip


def write(points: list[Point]) -> None:
    """Writes `points` to `FILE`."""
    rows = [
        {
            **{field: getattr(point, field) for field in _WORDS},
            "plus": [work.as_data() for work in point.plus],
            "minus": [work.as_data() for work in point.minus],
        }
        for point in points
    ]
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    FILE.write_text(f"[\n{text}\n]\n", encoding="utf-8")


_WORDS = ("kind", "kernel", "source", "chip", "shape", "measured_us")


def points() -> list[Point]:
    """Returns the points in `FILE`."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    sides = ("plus", "minus")
    return [
        Point(**row | {side: tuple(Work(**work) for work in row[side]) for side in sides}) for row in rows
    ]


def page(measured: list[Point]) -> str:
    """Returns the tables of the page: a row per class, then a row per point."""
    classes = [
        {
            "class": kind,
            "points": len(same),
            "within 0.75–1.33": sum(point.is_near for point in same),
            "measured ÷ estimate": f"{_spread(same)}",
            "median": f"{statistics.median(point.ratio for point in same):.2f}",
        }
        for kind in dict.fromkeys(point.kind for point in measured)
        if (same := [point for point in measured if point.kind == kind])
    ]
    rows = [
        {
            "kernel": point.kernel,
            "chip": point.chip,
            "shape": point.shape,
            "class": point.kind,
            "measured µs": f"{point.measured_us:,.1f}",
            "estimate µs": f"{point.estimate_us:,.1f}",
            "÷": f"{point.ratio:.2f}",
            "source": point.source,
        }
        for point in measured
    ]
    near = sum(point.is_near for point in measured)
    tables = [
        tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True) for lines in (classes, rows)
    ]
    return f"{near} of {len(measured)} points lie within {LOW}–{HIGH}.\n\n{tables[0]}\n\n{tables[1]}"


def _spread(same: list[Point]) -> str:
    ratios = sorted(point.ratio for point in same)
    return f"{ratios[0]:.2f}–{ratios[-1]:.2f}"


def draw(measured: list[Point], output: Path) -> None:
    """Plots measured ÷ estimate over the measured time. Points outside the bounds have their names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.axhspan(LOW, HIGH, color="#e8eef7", zorder=0)
    axes.axhline(1, color="#8a8f98", linewidth=0.8, zorder=1)
    for kind, marker in zip(dict.fromkeys(point.kind for point in measured), "osDv^P*X", strict=True):
        same = [point for point in measured if point.kind == kind]
        axes.scatter(
            [point.measured_us for point in same], [point.ratio for point in same],
            label=f"{kind}, {sum(point.is_near for point in same)} of {len(same)}",
            marker=marker, s=30, alpha=0.85,
        )  # fmt: skip
    for point in measured:
        if not point.is_near:
            axes.annotate(
                f"{point.kernel.partition(',')[0]}, {point.chip}, {point.shape}",
                (point.measured_us, point.ratio), xytext=(6, 4 if point.ratio > 1 else -9),
                textcoords="offset points", fontsize=7,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="measured, µs", ylabel="measured ÷ estimate", ylim=(0.5, 3))
    axes.set_xlim(2, 3000)
    axes.set_xticks([3, 10, 30, 100, 300, 1000], ["3", "10", "30", "100", "300", "1,000"])
    axes.set_yticks([0.5, LOW, 1, HIGH, 2, 3], ["0.5", "0.75", "1", "1.33", "2", "3"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="within 0.75–1.33", loc="upper left", fontsize=8, title_fontsize=8)
    figure.savefig(output)


def replaced(text: str, table: Callable[[], str]) -> str:
    """Returns `text` with `table()` between the marks `BEGIN` and `END`."""
    before, begin, rest = text.partition(BEGIN)
    assert begin, "the page has the marks"
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels anew")
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    options = parser.parse_args()
    if options.compile:
        write([*compiled()])
    measured = points()
    print(page(measured))
    if options.write:
        text = replaced(PAGE.read_text(encoding="utf-8"), lambda: page(measured))
        PAGE.write_text(text, encoding="utf-8")
        draw(measured, PICTURE)


if __name__ == "__main__":
    main()
