"""Training step of a Llama of about one billion parameters on the GPU of this machine, MXFP8 against BF16.

Forward and backward, no optimizer; copies of one model, alternating in one process; peak memory of each.
Without a GPU it says so and measures nothing. Usage: python benchmarks/gpu_training.py [--layers 16]
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch

import mxcompile

VOCABULARY = 32768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_training: skipped, no CUDA or ROCm device")
        return
    backends = {"bf16 inductor": "inductor", "mxcompile mxfp8": "mxfp8"}
    peaks = {name: peak_bytes(backend, options) for name, backend in backends.items()}
    runs = {name: step(backend, options) for name, backend in backends.items()}
    times = common.alternate(runs, repeats=options.repeats)
    rows = [
        {
            "model": f"llama {options.layers}×{options.width}",
            "batch": f"{options.batch}×{options.length}",
            "run": name,
            "median_ms": round(statistics.median(taken), 2),
            "bf16_over_this": round(1 / common.median_ratio(times, name, "bf16 inductor"), 3),
            "peak_gib": round(peaks[name] / 2**30, 2),
        }
        for name, taken in times.items()
    ]
    common.show(rows)
    print(mxcompile.reports()[-1])
    common.write("gpu_training", rows)


def step(backend: str, options: argparse.Namespace) -> Callable[[], None]:
    """Forward and backward of a fresh model under `backend`, waited for."""
    torch._dynamo.reset()
    model: Any = common.llama(
        layers=options.layers, width=options.width, feed_forward=4 * options.width, vocabulary=VOCABULARY
    ).cuda()
    compiled = torch.compile(model, backend=backend)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length), device="cuda")

    def run() -> None:
        model.zero_grad(set_to_none=True)
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        torch.cuda.synchronize()

    return run


def peak_bytes(backend: str, options: argparse.Namespace) -> int:
    """The most memory a step needs, weights and gradients included."""
    run = step(backend, options)
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return peak


if __name__ == "__main__":
    main()
