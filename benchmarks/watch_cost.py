"""Measures the cost of a watch: a Llama's training steps with and without a watch, alternating.

    plain        no watch
    unsampled    a watch, in steps that it does not sample
    sampled      a watch that samples all statistics of all operands in every step
    nonfinite    a watch that checks every step for NaN and Inf

Times are CPU time of the process, so that other programs do not count. Ratios are medians over the rounds.

Usage: python benchmarks/watch_cost.py [--repeats 15] [--layers 2] [--width 512] [--batch 2] [--length 256]
[--dtype float32]
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import nn

import mxcompile

WATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unsampled": {"every": 1, "start": 10**9},
    "sampled": {"every": 1},
    "nonfinite": {"every": None, "nonfinite": "warn"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dry", action="store_true", help="do not write the results")
    options = parser.parse_args()
    rows = measure(options)
    common.show([{name: value for name, value in row.items() if name != "times_ms"} for row in rows])
    if not options.dry:
        common.write("watch_cost", rows)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each kind of step."""
    width = options.width
    sizes = {"layers": options.layers, "width": width, "feed_forward": 11 * width // 4, "vocabulary": 1024}
    model = common.llama(**sizes).to(getattr(torch, options.dtype))
    tokens = torch.randint(sizes["vocabulary"], (options.batch, options.length))
    load = os.getloadavg()[0]
    runs = {name: step(copy.deepcopy(model), tokens, settings) for name, settings in WATCHES.items()}
    times = common.alternate(runs, repeats=options.repeats, clock=time.process_time)
    shared = {
        "dtype": options.dtype,
        **sizes,
        "tokens": tokens.numel(),
        "clock": "process",
        "load_before": round(load, 1),
    }
    return [
        {
            **shared,
            "step": name,
            "median_ms": round(statistics.median(times[name]), 2),
            "over_plain": round(common.median_ratio(times, name, "plain"), 3),
            "times_ms": [round(time_ms, 2) for time_ms in times[name]],
        }
        for name in WATCHES
    ]


def step(model: nn.Module, tokens: torch.Tensor, settings: dict[str, Any]) -> Callable[[], None]:
    """Returns a training step of `model`, compiled with a watch of `settings`; {} means no watch."""
    watch = mxcompile.Watch(_nowhere, **settings) if settings else None
    compiled = torch.compile(model, backend=mxcompile.Backend(root=model, watch=watch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _nowhere(record: dict[str, Any]) -> None:
    """Discards `record`, so that the cost of a disk is not measured."""


if __name__ == "__main__":
    main()
