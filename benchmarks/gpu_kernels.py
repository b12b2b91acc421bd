"""The Triton kernels on the GPU of this machine, each beside its baseline.

    casts    every layout, as a share of the bandwidth a copy of the same tensor reaches
    gemms    scaled matmul and fused quantize + matmul against cuBLAS in BF16, where the chip has an MX GEMM
    decode   weight-only matmul, 1 to 32 tokens, against cuBLAS in BF16

Every kernel is first compared with its torch reference on the device: casts bit for bit, products within
FP32 accumulation. Calls are captured in CUDA graphs, over enough copies of the operands to defeat the L2
cache, and timed in alternating rounds; figures are medians. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from common import show, write
from torch import Tensor
from tqdm import tqdm

from mxcompile.errors import TargetError
from mxcompile.formats import Format
from mxcompile.lowering import targets
from mxcompile.lowering.targets import ScaleLayout, Target

CAST_SHAPES = ((8192, 4096), (16384, 8192), (8192, 14336))
GEMM_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672))
"""(N, K) of Llama-8B's and 70B's linear layers: fused QKV, attention projection, fused gate and up, down."""
GEMM_TOKENS = (16, 128, 2048, 16384)
DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
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
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / len(runs[name]))
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


def casts(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """Each layout of each shape, as a share of copy bandwidth."""
    from mxcompile.lowering.kernels import quantize
    from mxcompile.lowering.reference import quantize as reference

    fmt = Format()
    for m, n in CAST_SHAPES:
        sources = [torch.randn(m, n, device="cuda").bfloat16() for _ in range(copies_for(4 * m * n))]
        rowwise = reference.rowwise(sources[0], fmt, target.scale_layout)
        columnwise = reference.columnwise(sources[0], fmt, target.scale_layout)
        wanted = {"rowwise": [rowwise], "columnwise": [columnwise], "both": [rowwise, columnwise]}
        runs: dict[str, list[Call]] = {"copy": [source.clone for source in sources]}
        for layout in quantize.Layout:
            made = quantize.quantize(sources[0], layout, fmt, target.scale_layout, target)
            for copy, (qdata, scale) in zip(made, wanted[layout], strict=True):
                check_bits(copy.qdata, qdata, f"{layout} elements")
                check_bits(copy.scale, scale, f"{layout} scales")
            plans = [quantize.plan(source, layout, fmt, target.scale_layout, target)[0] for source in sources]
            runs[layout] = [plan.run for plan in plans]
        times = graph_times(runs, repeats)
        copy_gbs = 4 * m * n / times["copy"] / 1e3
        for layout in quantize.Layout:
            num_bytes = m * n * (2 + 33 / 32 * (2 if layout is quantize.Layout.BOTH else 1))
            gbs = num_bytes / times[layout] / 1e3
            yield {
                "part": "casts",
                "kernel": f"quantize {layout}",
                "shape": f"{m}x{n}",
                "time_us": round(times[layout], 2),
                "baseline": f"copy {copy_gbs:.0f} GB/s",
                "baseline_us": round(times["copy"], 2),
                "ratio": round(gbs / copy_gbs, 3),
            }


def _weights(
    n: int, k: int, count: int, scales: ScaleLayout, target: Target
) -> tuple[list[Tensor], list[Any]]:
    """BF16 weights [n, k], and the same quantized along k."""
    from mxcompile.lowering.kernels.quantize import Layout, quantize
    from mxcompile.lowering.kernels.scaled_mm import Operand

    weights = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(count)]
    made = [quantize(weight, Layout.ROWWISE, Format(), scales, target)[0] for weight in weights]
    return weights, [Operand(qdata=copy.qdata, scale=copy.scale) for copy in made]


def _row(part: str, kernel: str, m: int, n: int, k: int, times: Mapping[str, float]) -> dict[str, Any]:
    return {
        "part": part,
        "kernel": kernel,
        "shape": f"{m}x{n}x{k}",
        "time_us": round(times[kernel], 2),
        "baseline": "torch.mm (bfloat16)",
        "baseline_us": round(times["baseline"], 2),
        "ratio": round(times["baseline"] / times[kernel], 3),
    }


def gemms(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """MX GEMMs over cuBLAS in BF16; nothing where the chip has none."""
    from mxcompile.lowering.reference.scaled_mm import scaled_mm as reference

    if not target.native:
        print(f"gemms: skipped, {target.name} has no MX GEMM; its products are cuBLAS's in BF16")
        return
    for n, k in GEMM_SHAPES:
        dense, weights = _weights(n, k, copies_for(2 * n * k), target.scale_layout, target)
        for m in GEMM_TOKENS:
            xs, operands = _weights(m, k, len(dense), target.scale_layout, target)
            forms = _gemm_forms(xs, operands, weights, target)
            if m <= 256:  # the FP64 reference of more takes longer than all measurements
                a, b = operands[0], weights[0]
                wanted = reference(a.qdata, a.scale, b.qdata, b.scale, None)
                for name, plans in forms.items():
                    plans[0][0].run()
                    check_product(plans[0][1], *wanted, k, name)
            baseline = [lambda x=x, w=w: x @ w.t() for x, w in zip(xs, dense, strict=True)]
            runs = {name: [launch.run for launch, _ in plans] for name, plans in forms.items()}
            times = graph_times({"baseline": baseline, **runs}, repeats)
            for name in forms:
                yield _row("gemms", name, m, n, k, times)


def _gemm_forms(
    xs: Sequence[Tensor], operands: Sequence[Any], weights: Sequence[Any], target: Target
) -> dict[str, list[tuple[Any, Tensor]]]:
    """Every form that can run the products: one plan for each pair of operands."""
    from mxcompile.lowering.kernels import fused_quantize_mm, scaled_mm, scaled_mm_tiled
    from mxcompile.lowering.kernels.configs import tiled_configs

    out, fmt = torch.bfloat16, Format()
    pairs = list(zip(operands, weights, strict=True))
    forms = {"scaled_mm": [scaled_mm.plan(*pair, None, out, target) for pair in pairs]}
    if scaled_mm_tiled.fits(*pairs[0], out):
        for choice in range(len(tiled_configs(target))):
            plans = [scaled_mm_tiled.plan(*pair, None, out, target, choice) for pair in pairs]
            forms[f"scaled_mm_tiled {choice}"] = plans
    sources = zip(xs, weights, strict=True)
    fused = [fused_quantize_mm.plan(x, w, None, fmt, out, target) for x, w in sources]
    return forms | {"fused_quantize_mm": fused}


def decode(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """Weight-only products of few tokens over cuBLAS in BF16."""
    from mxcompile.lowering.kernels import weight_only_mm
    from mxcompile.lowering.reference.weight_only_mm import weight_only_mm as reference

    def run_all(launches: Sequence[Any]) -> None:
        for launch in launches:
            launch.run()

    for n, k in GEMM_SHAPES:
        dense, weights = _weights(n, k, copies_for(n * k), ScaleLayout.ROW_MAJOR, target)
        for m in DECODE_TOKENS:
            x = torch.randn(m, k, device="cuda").bfloat16()
            plans = [weight_only_mm.plan(x, w, None, torch.bfloat16, target) for w in weights]
            run_all(plans[0][0])
            wanted = reference(x, weights[0].qdata, weights[0].scale, None)
            check_product(plans[0][1], *wanted, k, "weight_only_mm")
            runs: dict[str, Sequence[Call]] = {
                "baseline": [lambda w=w, x=x: x @ w.t() for w in dense],
                "weight_only_mm": [lambda launches=launches: run_all(launches) for launches, _ in plans],
            }
            yield _row("decode", "weight_only_mm", m, n, k, graph_times(runs, repeats))


PARTS = {"casts": casts, "gemms": gemms, "decode": decode}


def gpu() -> dict[str, str]:
    """Name and clocks of the device, as far as the driver's tool tells."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader", "-i", "0"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        clocks = "unknown"
    return {"gpu": torch.cuda.get_device_name(), "clocks": clocks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped {', '.join(arguments.part)}: no CUDA or ROCm device here; nothing was measured")
        return
    target = targets.of_device(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for part in arguments.part:
        try:
            rows += tqdm(PARTS[part](target, arguments.repeats), desc=part)
        except TargetError as error:
            print(f"{part}: skipped, {error}")
    if rows:
        show(rows)
        device = gpu()
        write("gpu_kernels", [row | device for row in rows])


if __name__ == "__main__":
    main()
