"""Training step of a Llama of about one billion parameters on the GPU of this machine: BF16, MXFP8, torchao.

Forward and backward, no optimizer; copies of one model, alternating in one process; peak memory of each.
torchao takes part where it is installed, emulated where the chip has no MX GEMM.
Without a GPU it says so and measures nothing. Usage: python benchmarks/gpu_training.py [--layers 16]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch
from gpu_common import device
from torch import nn

import mxcompile
from mxcompile.lowering import targets

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
    models = ways(options)
    peaks = {name: peak_bytes(make) for name, make in models.items()}
    runs = {name: step(make) for name, make in models.items()}
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
    common.write("gpu_training", [row | device() for row in rows])


def ways(options: argparse.Namespace) -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    """By name of the run: what makes its compiled model and its tokens [batch, length]."""
    native = targets.of_device(torch.device("cuda")).native

    def bare() -> nn.Module:
        torch._dynamo.reset()
        return common.llama(
            layers=options.layers,
            width=options.width,
            feed_forward=4 * options.width,
            vocabulary=VOCABULARY,
            heads=options.width // 128,
        ).cuda()

    def made(compiled: Any) -> tuple[nn.Module, torch.Tensor]:
        return compiled, torch.randint(VOCABULARY, (options.batch, options.length), device="cuda")

    found = {
        "bf16 inductor": lambda: made(torch.compile(bare())),
        "mxcompile mxfp8": lambda: made(torch.compile(bare(), backend="mxfp8")),
    }
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: left out")
        return found
    name = "torchao mxfp8" if native else "torchao mxfp8 (emulated)"
    found[name] = lambda: made(torch.compile(common.torchao_model(bare(), emulated=not native)))
    return found


def step(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> Callable[[], None]:
    """Forward and backward of a fresh model, waited for."""
    model, tokens = make()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.cuda.synchronize()

    return run


def peak_bytes(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> int:
    """The most memory a step needs, weights and gradients included."""
    run = step(make)
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
