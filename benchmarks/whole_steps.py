"""Compares published training runs with estimates: for the library of the run, and for this project.

The layer is the layer of `predicted.py`, scaled to a run's tokens and length. The graph of a library is the
BF16 graph with scaled products and added cast kernels. Casts of torchao count by their bytes or, for NVFP4,
by published times; casts of Transformer Engine by its published times with and without casts. Products that
read the same tensor share its cast. This project's graph fuses casts with their prologues.
Usage: python benchmarks/whole_steps.py [--write]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import calibration
import predicted
from tabulate import tabulate

from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.offline import Range, Rates, Work
from mxcompile.offline.estimate import library_work
from mxcompile.offline.training import LayerWork, TrainingStep, scaled

BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"
WIDTH, FEED_FORWARD, KEYS = 4096, 14336, 1024
LINEAR = (
    *((WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH)),
    *((FEED_FORWARD, WIDTH), (FEED_FORWARD, WIDTH), (WIDTH, FEED_FORWARD)),
)
"""(N, K) of the linear layers in a Llama-8B layer."""

INPUTS = (WIDTH, WIDTH, WIDTH, FEED_FORWARD)
"""K of their distinct inputs: q, k and v share an input, gate and up share an input."""

LLAMA = {"layers": 32, "width": WIDTH, "vocabulary": 128256, "parameters": 8_030_000_000}
QWEN = {"layers": 36, "width": WIDTH, "vocabulary": 151936, "parameters": 8_190_000_000}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a cast. num_bytes: bytes per element. us: measured µs per million elements, or 0."""

    num_bytes: float = 0.0
    us: float = 0.0

    def work(self, elements: float, rates: Rates) -> Work:
        """Returns the work for `elements` elements; a measured time is expressed as issue time."""
        return Work(num_bytes=elements * self.num_bytes, issue_us=elements / 1e6 * self.us * rates["issue"])


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of a library.

    product: kind of rate of its products. inputs, weights: kernels that cast an input or a weight in forward.
    gradients: kernels that cast a gradient in backward. columns: kernels that cast an input or a weight again
    in backward. opaque: whether torchtitan's selective recomputation does not recognise its products, as with
    some tensor subclasses, and recomputes everything that a gradient needs.
    """

    product: str
    inputs: tuple[Kernel, ...]
    weights: tuple[Kernel, ...]
    gradients: tuple[Kernel, ...]
    columns: tuple[Kernel, ...] = ()
    opaque: bool = False


_ROW, _COLUMN, _SWIZZLE = Kernel(3 + 1 / 32), Kernel(1.5 * (3 + 1 / 32)), Kernel(2 / 32)
"""torchao's MXFP8 casts, rowwise and columnwise (138 and 205 µs on a B200), and its scale kernel."""

_FP8 = Kernel(2 + 3)
"""Reads an element for the amax, then reads it again and writes an FP8 element."""

_LARGEST, _ROUNDED, _STOCHASTIC, _WEIGHT = (Kernel(us=us) for us in (0.73, 1.94, 2.84, 4.24))
"""torchao's Triton kernels for NVFP4 in both layouts (benchmarks/prototype/nvfp4_training). They take 42.9,
113.7, 166.6 and 249 µs on a GB200 for 58.7 million elements."""


def _torchao_fp8(product: str) -> Graph:
    return Graph(product=product, inputs=(_FP8,), weights=(_FP8,), gradients=(_FP8,) * 2, columns=(_FP8,))


def _engine(product: str, us: float) -> Graph:
    """Returns the graph of Transformer Engine, which casts weights once per step."""
    cast = (Kernel(us=us),)
    return Graph(product=product, inputs=cast, weights=(), gradients=cast)


GRAPHS = {
    "torchao, MXFP8": Graph(
        product="mxfp8",
        inputs=(_ROW, _SWIZZLE),
        weights=(_ROW, _SWIZZLE),
        gradients=(_ROW, _SWIZZLE, _COLUMN, _SWIZZLE),
        columns=(_COLUMN, _SWIZZLE),
    ),
    "torchao, FP8 by tensor": _torchao_fp8("fp8_tensor"),
    "torchao, FP8 by row": _torchao_fp8("fp8_channel"),
    "torchao, NVFP4": Graph(
        product="fp4",
        inputs=(_LARGEST, _ROUNDED),
        weights=(Kernel(2), _WEIGHT),
        gradients=(_LARGEST, _STOCHASTIC),
        opaque=True,
    ),
    "TE, FP8 by tensor": _engine("fp8_tensor", 0.96),
    "TE, MXFP8": _engine("mxfp8", 0.74),
    "TE, NVFP4": _engine("fp4", 1.08),
}
"""Graphs by library. Cast times of Transformer Engine are the differences between its GEMM profiles with and
without casts on a B300: 2.34, 1.82 and 2.69 ms for 2,482 million elements."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run. measured: step time ÷ BF16's. bf16_us: µs per token in BF16.

    theirs: key of `GRAPHS`. ours: preset of this project. low: number of layers that are not BF16, None for
    all. tokens: tokens of a GPU in a micro-batch. length: tokens of a sequence.
    """

    name: str
    source: str
    target: str
    measured: float
    bf16_us: float
    theirs: str
    ours: str
    tokens: int
    length: int
    model: dict[str, int]
    gpus: int = 1
    link_gbs: float = 700.0
    recompute: str = "selective"
    micro_batches: int = 1
    low: int | None = None

    @property
    def step(self) -> TrainingStep:
        """The training step of one GPU."""
        return TrainingStep(
            **self.model, tokens=self.tokens, micro_batches=self.micro_batches, gpus=self.gpus,
            link_gbs=self.link_gbs, recompute=self.recompute,
        )  # fmt: skip

    def over_bf16(self, layer: LayerWork, bf16: LayerWork, rates: Rates) -> Range:
        """Returns the step time with `layer` ÷ the step time in BF16."""
        step, layers = self.step, self.model["layers"]
        share = (layers if self.low is None else self.low) / layers
        return Range.from_rates(
            lambda moved: 1 - share + share * step.us(layer, moved) / step.us(bf16, moved), rates
        )


def _run(name: str, measured: float, theirs: str, ours: str, **others: Any) -> Run:
    return Run(name=name, measured=measured, theirs=theirs, ours=ours, **{**_AO_RUNS, **others})


_AO_RUNS = {
    "source": "torchao, training.md",
    "bf16_us": 120.4,
    "target": "sm_100",
    "tokens": 8192,
    "length": 8192,
    "model": LLAMA,
    "gpus": 8,
}
_TITAN: dict[str, Any] = {
    "source": "torchtitan, nvfp4.md",
    "bf16_us": 45.6,
    "tokens": 65536,
    "length": 2048,
    "gpus": 4,
}
_QWEN: dict[str, Any] = {**_TITAN, "bf16_us": 47.8, "model": QWEN, "tokens": 32768}
_MEGATRON: dict[str, Any] = {
    "source": "Megatron-Bridge, reduced_precision_training.ipynb",
    "bf16_us": 44.4,
    "tokens": 16384,
    "micro_batches": 16,
    "gpus": 4,
    "recompute": "none",
}
_STATION: dict[str, Any] = {
    **_MEGATRON,
    "source": "build.nvidia.com/station/nvfp4-pretraining",
    "bf16_us": 34.5,
    "length": 4096,
    "gpus": 1,
}
_H100: dict[str, Any] = {"target": "sm_90", "link_gbs": 350.0, "bf16_us": 162.6}
_MI300: dict[str, Any] = {"target": "gfx942", "link_gbs": 300.0, "bf16_us": 186.0}

RUNS = (
    _run("Llama-3 8B, 4 × GB200, MXFP8", 0.78, "torchao, MXFP8", "nvidia", **_TITAN),
    _run("Llama-3 8B, 4 × GB200, NVFP4", 0.69, "torchao, NVFP4", "nvfp4", **_TITAN),
    _run("Llama-3 8B, 4 × GB200, NVFP4 in 27 of 32", 0.73, "torchao, NVFP4", "nvfp4", **_TITAN, low=27),
    _run("Qwen3 8B, 4 × GB200, MXFP8", 0.76, "torchao, MXFP8", "nvidia", **_QWEN),
    _run("Qwen3 8B, 4 × GB200, NVFP4 in 30 of 36", 0.78, "torchao, NVFP4", "nvfp4", **_QWEN, low=30),
    _run(
        "Llama-3.1 8B, 4 × GB200, FP8 in 30 of 32",
        0.74,
        "TE, FP8 by tensor",
        "fp8_tensor",
        **_MEGATRON,
        low=30,
    ),
    _run("Llama-3.1 8B, 4 × GB200, MXFP8", 0.74, "TE, MXFP8", "nvidia", **_MEGATRON),
    _run("Llama-3.1 8B, 4 × GB200, NVFP4 in 28 of 32", 0.64, "TE, NVFP4", "nvfp4", **_MEGATRON, low=28),
    _run("Llama-3.1 8B, 1 × GB300, NVFP4 in 28 of 32", 0.60, "TE, NVFP4", "nvfp4", **_STATION, low=28),
    _run("Llama-3 8B, 8 × B200, MXFP8", 0.83, "torchao, MXFP8", "nvidia"),
    _run("Llama-3 8B, 8 × B200, FP8 by tensor", 0.80, "torchao, FP8 by tensor", "fp8_delayed"),
    _run("Llama-3 8B, 8 × B200, FP8 by row", 0.96, "torchao, FP8 by row", "fp8_rowwise"),
    _run("Llama-3 8B, 8 × H100, FP8 by tensor", 0.80, "torchao, FP8 by tensor", "fp8_delayed", **_H100),
    _run("Llama-3 8B, 8 × MI300X, FP8 by tensor", 0.87, "torchao, FP8 by tensor", "fp8_delayed", **_MI300),
    _run("Llama-3 8B, 8 × MI300X, FP8 by row", 0.91, "torchao, FP8 by row", "fp8_rowwise", **_MI300),
)
"""Link bandwidths are 7/8 of the data sheets'. A GB300 counts as a B200, although its FP4 rate differs,
because FP4 products take equally long on both."""


def layer(row: dict[str, Any]) -> LayerWork:
    """Returns the layer of a predicted row. Forward ends after its last product and the following "rest"."""
    works = [(kind, Work(**fields)) for kind, fields in row["works"]]
    products = [at for at, (kind, _) in enumerate(works) if kind == "product"]
    end = products[len(LINEAR) - 1] + 1
    while works[end][0] == "rest":
        end += 1
    return LayerWork(forward=tuple(works[:end]), backward=tuple(works[end:]))


def graph_layer(bf16: LayerWork, graph: Graph, tokens: int, rates: Rates) -> LayerWork:
    """Returns the BF16 layer with the scaled products and casts of a library, for `tokens` tokens."""
    forward, backward = (
        tuple(
            (kind, _rated(work, graph.product, rates.target) if kind == "product" else work)
            for kind, work in side
        )
        for side in (bf16.forward, bf16.backward)
    )
    weights = [n * k for n, k in LINEAR]
    inputs = [tokens * k for k in INPUTS]
    casts = (*_casts(graph.inputs, inputs, rates), *_casts(graph.weights, weights, rates))
    gradients = _casts(graph.gradients, [tokens * n for n, _ in LINEAR], rates)
    columns = _casts(graph.columns, [*inputs, *weights], rates)
    others = tuple(launch for launch in forward if launch[0] == "rest")
    products = [launch for launch in forward if launch[0] == "product"]
    return LayerWork(
        forward=(*forward, *casts),
        backward=(*backward, *gradients, *columns),
        recomputed=(*others, *products[:-1], *casts) if graph.opaque else None,
    )


def _casts(kernels: tuple[Kernel, ...], sizes: list[int], rates: Rates) -> Iterator[tuple[str, Work]]:
    return (("cast", kernel.work(size, rates)) for size in sizes for kernel in kernels)


def _rated(work: Work, kind: str, target: Target) -> Work:
    """Returns the work of a BF16 product as a scaled library product of the rate `kind`."""
    assert target.peak is not None
    flops = work.mma_us * target.peak.tflops("bf16") * 1e6
    return library_work(num_bytes=work.num_bytes * 0.6, flops=flops, product=kind, target=target)


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Estimates of a run. bf16_us: µs per token. theirs, ours: steps ÷ BF16's; ours is None if unknown."""

    bf16_us: float
    theirs: Range
    ours: Range | None


def estimates(run: Run, rows: dict[tuple[str, str], dict[str, Any]]) -> Estimates:
    """Returns the estimates for the library's graph and for this project's graph."""
    rates = Rates.for_target(TARGETS[run.target])
    size = {"tokens": run.tokens / predicted.TOKENS, "length": run.length / predicted.TOKENS}
    bf16 = _scaled(layer(rows[run.target, predicted.BF16]), **size)
    theirs = graph_layer(bf16, GRAPHS[run.theirs], run.tokens, rates)
    ours = rows.get((run.target, run.ours))
    return Estimates(
        bf16_us=run.step.us(bf16, rates) / (run.tokens * run.micro_batches),
        theirs=run.over_bf16(theirs, bf16, rates),
        ours=run.over_bf16(_scaled(layer(ours), **size), bf16, rates) if ours else None,
    )


def _scaled(work: LayerWork, *, tokens: float, length: float) -> LayerWork:
    return LayerWork(
        forward=scaled(work.forward, tokens=tokens, length=length),
        backward=scaled(work.backward, tokens=tokens, length=length),
    )


def table() -> str:
    """Returns the table of all runs, measured and estimated."""
    rows = predicted.newest(predicted.TOKENS)
    shown = []
    for run in RUNS:
        estimated = estimates(run, rows)
        shown.append(
            {
                "run": run.name,
                "BF16, µs a token": f"{run.bf16_us:.1f}; estimate {estimated.bf16_us:.1f}",
                "measured": f"{run.measured:.2f}",
                "estimate, its graph": estimated.theirs.text(".2f"),
                "estimate, ours": "" if estimated.ours is None else estimated.ours.text(".2f"),
                "graph": run.theirs.partition(",")[0],
                "source": run.source,
            }
        )
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    options = parser.parse_args()
    text = table()
    print(text)
    if options.write:
        page = calibration.PAGE
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
