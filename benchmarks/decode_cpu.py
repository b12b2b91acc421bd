"""Decode and prefill of one linear layer on this machine: stored MXFP8 weights against BF16 and int8.

Rows of BF16 activations times a weight; decode is of interest where that is larger than the last-level cache.
All alternate in one process:

    bf16 inductor            torch.compile of `F.linear`
    mxcompile mxfp8          the same with its weight stored, under backend="mxfp8"
    torchao int8             int8 weight-only, compiled
    llama.cpp q8_0           where --llama names a program that prints "NxK q8_0 least T ms" for every shape

Usage: python benchmarks/decode_cpu.py [--repeats 30] [--rows 1 512] [--shapes 4096x4096 …] [--llama PROGRAM]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile import ops

SHAPES = ("14336x4096", "4096x14336", "4096x4096")


class Stored(nn.Module):
    """A linear layer of a weight stored in MXFP8."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        qdata, scale = ops.quantize(weight, -1, torch.float8_e4m3fn, "rceil")
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight's values."""
        return F.linear(x, ops.dequantize(self.qdata, self.scale, -1, x.dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 512])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="of the weight: N x K")
    parser.add_argument("--no-torchao", action="store_true")
    parser.add_argument("--llama", help="program that times llama.cpp's Q8_0, one row")
    options = parser.parse_args()
    llama = _llama(options.llama) if options.llama else {}
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for m in options.rows:
            rows += measure(shape, m, options.repeats, llama, with_torchao=not options.no_torchao)
    common.show([{k: v for k, v in row.items() if k != "times_ms"} for row in rows])
    common.write("decode_cpu", rows)


@torch.no_grad()
def measure(
    shape: str, m: int, repeats: int, llama: dict[str, float], *, with_torchao: bool
) -> list[dict[str, Any]]:
    """One row per way of multiplying `m` rows by a weight of `shape`."""
    torch._dynamo.reset()
    n, k = map(int, shape.split("x"))
    torch.manual_seed(0)
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    models: dict[str, Callable[..., Any]] = {
        "bf16 inductor": torch.compile(linear, dynamic=False),
        "mxcompile mxfp8": torch.compile(Stored(weight), backend="mxfp8", dynamic=False),
    }
    if with_torchao:
        models["torchao int8"] = torch.compile(_int8(weight), dynamic=False)
    runs = {name: (lambda model=model: model(x)) for name, model in models.items()}
    times = common.alternate(runs, repeats=repeats, warmup=3)
    if m == 1 and shape in llama:
        times["llama.cpp q8_0 (least)"] = [llama[shape]]
    return [_row(shape, m, run, times) for run in times]


def _row(shape: str, m: int, run: str, times: dict[str, list[float]]) -> dict[str, Any]:
    median = statistics.median(times[run])
    return {
        "weight": shape,
        "rows": m,
        "run": run,
        "median_ms": round(median, 3),
        "least_ms": round(min(times[run]), 3),
        "bf16_over_this": round(statistics.median(times["bf16 inductor"]) / median, 2),
        "times_ms": [round(t, 3) for t in times[run]],
    }


def _int8(weight: Tensor) -> nn.Module:
    """Torchao's int8 weight-only linear layer. Raises ImportError without torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear


def _llama(program: str) -> dict[str, float]:
    """Least time in ms by shape."""
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {shape: float(ms) for shape, ms in re.findall(r"(\d+x\d+) q8_0 least ([\d.]+) ms", printed)}


if __name__ == "__main__":
    main()
