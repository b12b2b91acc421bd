"""Whole training steps beside published runs: by the graph of the library that ran, and by this project's.

The layer is that of `predicted.py`, scaled to a run's tokens and length. A library's graph is BF16's with the
library's scaled products and kernels for its casts. Casts of torchao count by their bytes or, for NVFP4, by
their published times. Casts of Transformer Engine count by its published times with and without casts.
Products that read the same tensor share its cast. This project's graph casts in producers.
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
"""(N, K) of a Llama-8B layer."""

INPUTS = (WIDTH, WIDTH, WIDTH, FEED_FORWARD)
"""K of the tensors that they read, three and two of them the same."""

LLAMA = {"layers": 32, "width": WIDTH, "vocabulary": 128256, "parameters": 8_030_000_000}
QWEN = {"layers": 36, "width": WIDTH, "vocabulary": 151936, "parameters": 8_190_000_000}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a cast. num_bytes: of an element. us: of a million elements, where it was timed."""

    num_bytes: float = 0.0
    us: float = 0.0

    def work(self, elements: float, rates: Rates) -> Work:
        """The work of `elements`; a time stands as instructions that take it."""
        return Work(num_bytes=elements * self.num_bytes, issue_us=elements / 1e6 * self.us * rates["issue"])


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of a library.

    product: kind of the rate of its products. inputs, weights: kernels that cast one forward. gradients: one
    backward. columns: an input and a weight once more backward. opaque: whether torchtitan's selection does
    not know its products, as it does products of tensor subclasses, and computes all that a gradient needs
    again.
    """

    product: str
    inputs: tuple[Kernel, ...]
    weights: tuple[Kernel, ...]
    gradients: tuple[Kernel, ...]
    columns: tuple[Kernel, ...] = ()
    opaque: bool = False


_ROW, _COLUMN, _SWIZZLE = Kernel(3 + 1 / 32), Kernel(1.5 * (3 + 1 / 32)), Kernel(2 / 32)
"""torchao's casts to MXFP8, that along columns in 205 for 138 µs on a B200, and a kernel for the scales."""

_FP8 = Kernel(2 + 3)
"""The largest magnitudes, then codes."""

_LARGEST, _ROUNDED, _STOCHASTIC, _WEIGHT = (Kernel(us=us) for us in (0.73, 1.94, 2.84, 4.24))
"""torchao's Triton kernels for NVFP4 in both layouts (benchmarks/prototype/nvfp4_training): on a GB200 42.9,
113.7, 166.6 and 249 µs for 58.7 million elements."""


def _torchao_fp8(product: str) -> Graph:
    return Graph(product=product, inputs=(_FP8,), weights=(_FP8,), gradients=(_FP8,) * 2, columns=(_FP8,))


def _engine(product: str, us: float) -> Graph:
    """Transformer Engine's, whose weights are cast once a step."""
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
"""Times of Transformer Engine are the difference between its GEMM profiles with and without casts on a B300:
2.34, 1.82 and 2.69 ms over 2,482 million elements."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """measured: published ratio of step times to BF16. bf16_us: published of a token in BF16.

    theirs: one of `GRAPHS`. ours: preset of this project. low: layers that are not BF16. tokens: of a GPU in
    a micro-batch, in sequences of `length`.
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
        """The step on one of the GPUs."""
        return TrainingStep(
            **self.model, tokens=self.tokens, micro_batches=self.micro_batches, gpus=self.gpus,
            link_gbs=self.link_gbs, recompute=self.recompute,
        )  # fmt: skip

    def over_bf16(self, layer: LayerWork, bf16: LayerWork, rates: Rates) -> Range:
        """The step over BF16's."""
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
"""The bandwidth of links is that of the data sheets, less an eighth. A GB300 counts as a B200: the product
that has another rate, in FP4, takes as long on both."""


def layer(row: dict[str, Any]) -> LayerWork:
    """The layer of a row of predictions: forward ends with the last of its products and what follows that."""
    works = [(kind, Work(**fields)) for kind, fields in row["works"]]
    products = [at for at, (kind, _) in enumerate(works) if kind == "product"]
    end = products[len(LINEAR) - 1] + 1
    while works[end][0] == "rest":
        end += 1
    return LayerWork(forward=tuple(works[:end]), backward=tuple(works[end:]))


def graph_layer(bf16: LayerWork, graph: Graph, tokens: int, rates: Rates) -> LayerWork:
    """BF16's layer of `tokens` with the scaled products and the casts of a library."""
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
    """A product of BF16 as one of the library's scaled ones."""
    assert target.peak is not None
    flops = work.mma_us * target.peak.bf16_tflops * 1e6
    return library_work(num_bytes=work.num_bytes * 0.6, flops=flops, product=kind, target=target)


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """bf16_us: of a token. theirs, ours: steps over BF16's, ours if it was predicted."""

    bf16_us: float
    theirs: Range
    ours: Range | None


def estimates(run: Run, rows: dict[tuple[str, str], dict[str, Any]]) -> Estimates:
    """By the library's graph and by ours."""
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
    """Every run, measured and estimated."""
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
