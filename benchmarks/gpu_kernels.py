"""The casts and the weight-only products on the GPU of this machine, each beside its baseline.

    casts    every layout, as a share of the bandwidth a copy of the same tensor reaches
    decode   weight-only matmul, 1 to 32 tokens, against cuBLAS in BF16: the kernel, and a compiled layer with
             its weight stored, which casts the activation too

Every kernel is first compared with its torch reference on the device: casts bit for bit, products within
FP32 accumulation. Calls are captured in CUDA graphs, over enough copies of the operands to defeat the L2
cache, and timed in alternating rounds; figures are medians. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import show, write
from gpu_common import (
    LAYERS,
    Call,
    check_bits,
    check_product,
    copies_for,
    device,
    graph_times,
    product_row,
    quantized,
)
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from mxcompile import ops
from mxcompile.errors import TargetError
from mxcompile.formats import Format, ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.targets import Target

CAST_SHAPES = ((8192, 4096), (16384, 8192), (8192, 14336))
DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
COMPILED_TOKENS = (1, 8, 32)
"""Each of them takes a compile."""


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


class StoredLinear(nn.Module):
    """A linear layer [N, K] whose weight is stored in MXFP8."""

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """X [M, K] · Wᵀ."""
        return functional.linear(x, ops.dequantize(self.qdata, self.scale, -1, x.dtype))


def compiled_layers(weights: Sequence[Any]) -> list[Callable[[Tensor], Tensor]]:
    """A compiled layer for each weight; all run the same code."""
    torch._dynamo.reset()
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    return [
        torch.compile(
            StoredLinear(w.qdata, w.scale), backend="mxfp8", dynamic=False, options={"policy": policy}
        )
        for w in weights
    ]


@torch.no_grad()
def decode(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """Weight-only products of few tokens over cuBLAS in BF16."""
    from mxcompile.lowering.kernels import weight_only_mm
    from mxcompile.lowering.reference.weight_only_mm import weight_only_mm as reference

    def run_all(launches: Sequence[Any]) -> None:
        for launch in launches:
            launch.run()

    for n, k in (*LAYERS["llama-8b"], *LAYERS["llama-70b"]):
        dense, weights = quantized(n, k, copies_for(n * k), ScaleLayout.ROW_MAJOR, target)
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
            if m in COMPILED_TOKENS:
                layers = compiled_layers(weights)
                seen = ops.quantize_dequantize(x, -1, weights[0].qdata.dtype, "rceil", False, x.dtype)
                wanted = reference(seen, weights[0].qdata, weights[0].scale, None)
                check_product(layers[0](x), *wanted, k, "compiled layer")
                runs["compiled layer"] = [lambda layer=layer, x=x: layer(x) for layer in layers]
            times = graph_times(runs, repeats)
            for kernel in list(runs)[1:]:
                yield product_row("decode", kernel, (m, n, k), times)


PARTS = {"casts": casts, "decode": decode}


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
        found = device()
        write("gpu_kernels", [row | found for row in rows])


if __name__ == "__main__":
    main()
