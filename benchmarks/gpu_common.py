"""What the benchmarks of a GPU do alike: time, compare with a reference, name the device."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import Format, ScaleLayout
from mxcompile.lowering.targets import Target

LAYERS = {
    "llama-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(N, K) of fused QKV, attention projection, fused gate and up, down."""
_L2_BYTES = 256 << 20

Call = Callable[[], Any]


def graph_times(runs: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, float]:
    """Median time of one call of each run in µs; the calls of a run differ only in their operands."""
    graphs = {}
    for name, calls in runs.items():
        for call in calls[:1]:
            call()  # compiles, before the capture
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    times = alternate({name: graph.replay for name, graph in graphs.items()}, repeats)
    return {name: time / len(runs[name]) for name, time in times.items()}


def alternate(runs: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median time of each run in µs on the device, taken in turns, two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def copies_for(num_bytes: int) -> int:
    """How many copies of operands of that size are several times the L2 cache, at most 16."""
    return max(2, min(16, _L2_BYTES // max(num_bytes, 1)))


def check_bits(found: Tensor, wanted: Tensor, what: str) -> None:
    """Casts have no tolerance."""
    if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
        raise SystemExit(f"{what}: differs from the reference")


def check_product(out: Tensor, exact: Tensor, magnitude: Tensor, k: int, what: str) -> None:
    """Products: FP32 accumulation and one rounding."""
    bound = (k + 2) * 2.0**-24 * magnitude + torch.finfo(out.dtype).eps / 2 * exact.abs()
    worst = ((out.double() - exact).abs() / bound.clamp(min=1e-300)).max().item()
    if not worst <= 1.0:
        raise SystemExit(f"{what}: error is {worst:.3g} times what accumulation explains")


def quantized(
    n: int, k: int, count: int, scales: ScaleLayout, target: Target
) -> tuple[list[Tensor], list[Any]]:
    """BF16 matrices [n, k], and the same quantized along k, as operands of a product."""
    from mxcompile.lowering.kernels.quantize import Layout, quantize
    from mxcompile.lowering.kernels.scaled_mm import Operand

    dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(count)]
    made = [quantize(matrix, Layout.ROWWISE, Format(), scales, target)[0] for matrix in dense]
    return dense, [Operand(qdata=copy.qdata, scale=copy.scale) for copy in made]


def product_row(
    part: str, kernel: str, shape: tuple[int, int, int], times: Mapping[str, float], gemms: int = 1
) -> dict[str, Any]:
    """What `gemms` products of m×n×k took, in µs by kernel, beside the baseline, the vendor's in BF16."""
    m, n, k = shape
    return {
        "part": part,
        "kernel": kernel,
        "shape": f"{m}x{n}x{k}",
        "time_us": round(times[kernel], 2),
        "tflops": round(gemms * 2 * m * n * k / times[kernel] / 1e6, 1),
        "baseline": "torch.mm (bfloat16)",
        "baseline_us": round(times["baseline"], 2),
        "ratio": round(times["baseline"] / times[kernel], 3),
    }


def device() -> dict[str, str]:
    """Name and clocks of the GPU, as far as the driver's tool tells."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader", "-i", "0"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = "unknown"
    return {"gpu": torch.cuda.get_device_name(), "clocks": clocks}
