"""Training step on this machine: MXFP8 against BF16 Inductor and torchao's emulated MXFP8.

All three train copies of one Llama on the same tokens: forward, backward, no optimizer (it is the same for
all). They alternate in one process. Usage: python benchmarks/training_step.py [--repeats 15] [--no-torchao]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch

MODELS = {
    "llama 2×512": {"layers": 2, "width": 512, "feed_forward": 1408, "vocabulary": 4096},
    "llama 4×1024": {"layers": 4, "width": 1024, "feed_forward": 2816, "vocabulary": 8192},
}
BATCH, LENGTH = 4, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-torchao", action="store_true", help="leave out the slowest of the three")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name, options.repeats, with_torchao=not options.no_torchao)
    common.show([{k: v for k, v in row.items() if k != "times_ms"} for row in rows])
    common.write("training_step", rows)


def measure(name: str, repeats: int, *, with_torchao: bool) -> list[dict[str, Any]]:
    """One row per way of training the model `name`."""
    model = common.llama(**MODELS[name])
    tokens = torch.randint(MODELS[name]["vocabulary"], (BATCH, LENGTH))
    runs = {
        "bf16 inductor": step(torch.compile(copy.deepcopy(model)), tokens),
        "mxcompile mxfp8": step(torch.compile(copy.deepcopy(model), backend="mxfp8"), tokens),
    }
    if with_torchao:
        runs["torchao mxfp8 (emulated)"] = step(
            torch.compile(common.torchao_model(model, emulated=True)), tokens
        )
    times = common.alternate(runs, repeats=repeats)
    return [
        {
            "model": name,
            "batch": f"{BATCH}×{LENGTH}",
            "run": run,
            "median_ms": round(statistics.median(taken), 2),
            "ratio_to_bf16": round(common.median_ratio(times, run, "bf16 inductor"), 3),
            "times_ms": [round(t, 2) for t in taken],
        }
        for run, taken in times.items()
    ]


def step(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of `model` on `tokens`."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return run


if __name__ == "__main__":
    main()
