"""The best-case time saved by reducing gradients between ranks in MXFP8, and the error of the gradients.

    time     estimated steps of Llama-3 on meshes of B200 (`mxcompile mesh --links`): reduce-scatter in FP32
             or BF16 against an all-to-all of qdata and scales, without the casts and sums of the latter
    error    gradients of the demo's model, one batch per rank, summed over the ranks in FP32 after a cast to
             E4M3 with a scale per 32 elements, rounded stochastically or to nearest

BF16 is summed rank by rank, as in a ring. An error is ‖sum − FP64 sum‖ / ‖FP64 sum‖ over all gradients.
Without bias, the error of the mean over n draws would be the error of a draw ÷ √n.
Usage: python benchmarks/gradient_reduction.py [--time] [--error] [--draws 64] [--steps 40]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import common
import mesh_runs
import torch
from demo.training import VOCABULARY, Settings, batches, build_model, standard_library
from torch import Tensor
from torch.nn import functional

from mxcompile.formats import Format
from mxcompile.formats.encoding import decode_tensors, encode_tensors

RANKS = (2, 4, 8)
RUNS = tuple(
    mesh_runs.Run(
        name=f"{size}, {ranks:,} × B200",
        source="",
        size=size,
        mesh=f"dp={ranks}",
        parallel="fsdp",
        target="sm_100",
        links="nvlink=900,net=50",
        batch=1,
        recompute="full",
        tps={"nvidia": 0.0},
    )
    for size, ranks in (("8B", 8), ("8B", 128), ("70B", 1024))
)
WAYS = {"FP32": ("reduce-scatter", 1.0), "BF16": ("reduce-scatter", 1 / 2), "MXFP8": ("all-to-all", 33 / 128)}
"""Formats of sent gradients: (collective, bytes as a share of FP32's)."""
_STOCHASTIC, _NEAREST = Format.parse("e4m3 1x32 rceil stochastic"), Format.parse("e4m3 1x32 rceil")


def times(run: mesh_runs.Run) -> Iterator[dict[str, Any]]:
    """Yields a row per format: ms of the step, and of the exposed FSDP collectives in backward."""
    step = mesh_runs.step(run)
    work = step.works[0]
    reduced = [collective for collective in work.collectives if collective.kind == "reduce-scatter"]
    for way, (kind, share) in WAYS.items():
        sent = [
            replace(collective, kind=kind, num_bytes=round(share * collective.num_bytes))
            for collective in reduced
        ]
        others = [collective for collective in work.collectives if collective.kind != "reduce-scatter"]
        parts = replace(work, collectives=(*others, *sent)).parts(step.links, step.rates)
        yield {
            "run": run.name,
            "gradients in": way,
            "GB sent": sum(collective.num_bytes for collective in sent) / 1e9,
            "exposed in backward, ms": parts["exposed, FSDP backward"] / 1e3,
            "step, ms": sum(parts.values()) / 1e3,
        }


def gradients(steps: int, ranks: int) -> list[list[Tensor]]:
    """Returns, by rank, the FP32 gradients of the demo's weights on one batch, after `steps` steps."""
    settings = Settings(batch=8)
    model = build_model(settings)
    data = batches(standard_library().train, settings, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=settings.betas)

    def backward() -> None:
        window = next(data)
        logits = model(window[:, :-1]).logits
        functional.cross_entropy(logits.reshape(-1, VOCABULARY), window[:, 1:].reshape(-1)).backward()

    for _ in range(steps):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    results = []
    for _ in range(ranks):
        optimizer.zero_grad()
        backward()
        results.append([p.grad.clone() for p in model.parameters() if p.ndim == 2 and p.grad is not None])
    return results


def _ring(of_ranks: list[Tensor]) -> Tensor:
    """Returns the BF16 sum, rounded after every rank."""
    total = of_ranks[0].bfloat16()
    for part in of_ranks[1:]:
        total = total + part.bfloat16()
    return total


def _cast(fmt: Format, seed: int) -> Callable[[list[Tensor]], Tensor]:
    """Returns a function that casts each rank's tensor to `fmt`, with random numbers per rank, and sums."""

    def summed(of_ranks: list[Tensor]) -> Tensor:
        total = torch.zeros_like(of_ranks[0])
        for rank, part in enumerate(of_ranks):
            drawn = torch.tensor([seed]) if fmt.stochastic else None
            qdata, scale = encode_tensors(part, -1, fmt, drawn, rank)
            total += decode_tensors(qdata, scale, -1, fmt, torch.float32)
        return total

    return summed


def errors(by_rank: list[list[Tensor]], draws: int) -> Iterator[dict[str, Any]]:
    """Yields a row with the error of each way to sum the gradients of all ranks."""
    of_weights = [list(tensor) for tensor in zip(*by_rank, strict=True)]
    number = len(of_weights)
    exact = [torch.stack(of_ranks).double().sum(0) for of_ranks in of_weights]

    def error(sums: list[Tensor]) -> float:
        away = sum((a.double() - b).square().sum().item() for a, b in zip(sums, exact, strict=True))
        return math.sqrt(away / sum(b.square().sum().item() for b in exact))

    def row(way: str, **figures: float) -> dict[str, Any]:
        return {"ranks": len(by_rank), "gradients in": way, **figures}

    yield row("FP32", error=error([torch.stack(of_ranks).sum(0) for of_ranks in of_weights]))
    yield row("BF16, ring", error=error([_ring(of_ranks) for of_ranks in of_weights]))
    yield row("MXFP8, nearest", error=error([_cast(_NEAREST, 0)(of_ranks) for of_ranks in of_weights]))
    single, mean = 0.0, [torch.zeros_like(tensor) for tensor in exact]
    for draw in range(draws):
        seeds = range(1 + draw * number, 1 + (draw + 1) * number)
        sums = [_cast(_STOCHASTIC, seed)(of_ranks) for seed, of_ranks in zip(seeds, of_weights, strict=True)]
        single += error(sums) / draws
        mean = [total + tensor.double() / draws for total, tensor in zip(mean, sums, strict=True)]
    yield row(
        "MXFP8, stochastic", error=single, error_of_mean=error(mean), without_bias=single / math.sqrt(draws)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", action="store_true", help="only the times")
    parser.add_argument("--error", action="store_true", help="only the errors")
    parser.add_argument("--draws", type=int, default=64, help="of stochastic rounding")
    parser.add_argument("--steps", type=int, default=40, help="of training before the gradients")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not options.time:
        of_ranks = gradients(options.steps, max(RANKS))
        rows += [row for ranks in RANKS for row in errors(of_ranks[:ranks], options.draws)]
        common.show(rows)
    if not options.error:
        of_time = [row for run in RUNS for row in times(run)]
        common.show(of_time)
        rows += of_time
    common.write("gradient_reduction", rows)


if __name__ == "__main__":
    main()
