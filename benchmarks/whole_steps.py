"""Whole training steps beside published runs: by torchao's graph, and by this project's.

The layer is that of `predicted.py`, scaled to a run's tokens and length. torchao's graph is BF16's with the
library's scaled products and a kernel for each cast: every operand is cast where it is multiplied, rowwise
and columnwise apart, and the scales of MXFP8 are swizzled by a kernel of their own. Ours casts in producers.
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

LLAMA = {"layers": 32, "width": WIDTH, "vocabulary": 128256, "parameters": 8_030_000_000}
QWEN = {"layers": 36, "width": WIDTH, "vocabulary": 151936, "parameters": 8_190_000_000}

_COLUMNS = 1.5
"""torchao's cast along columns over that along rows: 205 against 138 µs on a B200."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """measured: published ratio of step times to BF16. theirs, ours: presets, of torchao and of this project.

    tokens: of a GPU in a step, in sequences of `length`.
    """

    name: str
    source: str
    target: str
    measured: float
    theirs: str
    ours: str
    tokens: int
    length: int
    model: dict[str, int]
    gpus: int
    link_gbs: float
    recompute: str

    @property
    def step(self) -> TrainingStep:
        """The step on one of the GPUs."""
        return TrainingStep(
            **self.model, tokens=self.tokens, gpus=self.gpus, link_gbs=self.link_gbs, recompute=self.recompute
        )


def _run(name: str, measured: float, theirs: str, ours: str, **others: Any) -> Run:
    return Run(name=name, measured=measured, theirs=theirs, ours=ours, **{**_AO_RUNS, **others})


_AO_RUNS = {
    "source": "torchao, training.md",
    "target": "sm_100",
    "tokens": 8192,
    "length": 8192,
    "model": LLAMA,
    "gpus": 8,
    "link_gbs": 700.0,
    "recompute": "selective",
}
_TITAN: dict[str, Any] = {
    "source": "torchtitan, docs/nvfp4.md",
    "tokens": 65536,
    "length": 2048,
    "gpus": 4,
    "recompute": "full",
}
_H100, _MI300 = ({"target": target, "link_gbs": gbs} for target, gbs in (("sm_90", 350.0), ("gfx942", 300.0)))

RUNS = (
    _run("Llama-3 8B, 4 × B200", 0.78, "mxfp8", "nvidia", **_TITAN),
    _run("Qwen3 8B, 4 × B200", 0.76, "mxfp8", "nvidia", **{**_TITAN, "model": QWEN}),
    _run("Llama-3 8B, 8 × B200, MXFP8", 0.83, "mxfp8", "nvidia"),
    _run("Llama-3 8B, 8 × B200, FP8 by tensor", 0.80, "fp8_tensor", "fp8_delayed"),
    _run("Llama-3 8B, 8 × B200, FP8 by row", 0.96, "fp8_channel", "fp8_rowwise"),
    _run("Llama-3 8B, 8 × H100, FP8 by tensor", 0.80, "fp8_tensor", "fp8_delayed", **_H100),
    _run("Llama-3 8B, 8 × MI300X, FP8 by tensor", 0.87, "fp8_tensor", "fp8_delayed", **_MI300),
    _run("Llama-3 8B, 8 × MI300X, FP8 by row", 0.91, "fp8_channel", "fp8_rowwise", **_MI300),
)
"""The bandwidth of links is that of the data sheets, less an eighth."""


def layer(row: dict[str, Any]) -> LayerWork:
    """The layer of a row of predictions: forward ends with the last of its products and what follows that."""
    works = [(kind, Work(**fields)) for kind, fields in row["works"]]
    products = [at for at, (kind, _) in enumerate(works) if kind == "product"]
    end = products[len(LINEAR) - 1] + 1
    while works[end][0] == "rest":
        end += 1
    return LayerWork(forward=tuple(works[:end]), backward=tuple(works[end:]))


def torchao_layer(bf16: LayerWork, scales: str, target: Target) -> LayerWork:
    """BF16's layer with scaled products and torchao's casts. scales: the kind of rate of the products."""
    casts = _mx_casts if scales == "mxfp8" else _fp8_casts
    sides = []
    for side, backward in ((bf16.forward, False), (bf16.backward, True)):
        products = [
            (kind, _rated(work, scales, target) if kind == "product" else work) for kind, work in side
        ]
        added = [("cast", work) for n, k in LINEAR for work in casts(n, k, backward)]
        sides.append((*products, *added))
    return LayerWork(forward=sides[0], backward=sides[1])


def _rated(work: Work, kind: str, target: Target) -> Work:
    """A product of BF16 as one of the library's scaled ones."""
    assert target.peak is not None
    flops = work.mma_us * target.peak.bf16_tflops * 1e6
    return library_work(num_bytes=work.num_bytes * 0.6, flops=flops, product=kind, target=target)


def _mx_casts(n: int, k: int, backward: bool) -> Iterator[Work]:
    """A cast and a swizzle of its scales for each operand; along columns in backward."""
    each, scale = 3 + 1 / 32, 2 / 32
    tokens = predicted.TOKENS
    if backward:
        sizes = [(tokens * n, 1.0), *((size, _COLUMNS) for size in (tokens * n, n * k, tokens * k))]
    else:
        sizes = [(tokens * k, 1.0), (n * k, 1.0)]
    for size, slower in sizes:
        yield Work(num_bytes=size * each * slower)
        yield Work(num_bytes=size * scale)


def _fp8_casts(n: int, k: int, backward: bool) -> Iterator[Work]:
    """The largest magnitudes, then codes; along columns in backward."""
    tokens = predicted.TOKENS
    for size in [tokens * n, tokens * n, n * k, tokens * k] if backward else [tokens * k, n * k]:
        yield Work(num_bytes=size * (2 + 3))


def estimates(run: Run, rows: dict[tuple[str, str], dict[str, Any]]) -> tuple[Range, Range | None]:
    """The step over BF16's: of torchao's graph, and of ours if it was predicted."""
    rates = Rates.of(TARGETS[run.target])
    bf16 = layer(rows[run.target, predicted.BF16])
    theirs = torchao_layer(bf16, run.theirs, rates.target)
    ours = rows.get((run.target, run.ours))
    scale = {"tokens": run.tokens / predicted.TOKENS, "length": run.length / predicted.TOKENS}
    over = [
        run.step.over(_scaled(each, **scale), _scaled(bf16, **scale), rates)
        for each in (theirs, *([layer(ours)] if ours else []))
    ]
    return over[0], over[1] if ours else None


def _scaled(found: LayerWork, *, tokens: float, length: float) -> LayerWork:
    return LayerWork(
        forward=scaled(found.forward, tokens=tokens, length=length),
        backward=scaled(found.backward, tokens=tokens, length=length),
    )


def table() -> str:
    """Every run, measured and estimated."""
    rows = predicted.newest(predicted.TOKENS)
    shown = []
    for run in RUNS:
        theirs, ours = estimates(run, rows)
        shown.append(
            {
                "run": run.name,
                "measured, torchao": f"{run.measured:.2f}",
                "estimate, torchao's graph": theirs.text(".2f"),
                "estimate, ours": "" if ours is None else ours.text(".2f"),
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
    made = table()
    print(made)
    if options.write:
        page = calibration.PAGE
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
