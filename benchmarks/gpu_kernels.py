"""The code that graphs run for casts and for stored weights, on the GPU of this machine, each by a baseline.

    casts    every layout, alone and behind a norm or a gated activation, beside the estimate that the model
             predicts for it and what its source costs in BF16
    decode   products of stored weights, 1 to 32 tokens, against cuBLAS in BF16: the product, and a compiled
             layer with its weight stored, which casts the activation too

Casts alone and products are first compared with their reference on the device: casts bit for bit, products
within FP32 accumulation. Calls are captured in CUDA graphs, over enough copies of the operands to defeat the
L2 cache, and timed in alternating rounds; figures are medians. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_common
import gpu_graphs
import torch
from common import show, write
from gpu_common import LAYERS, Call, check_bits, check_product, copies_for, quantized, row, values
from torch import Tensor
from tqdm import tqdm

from mxcompile import ops
from mxcompile.errors import TargetError
from mxcompile.formats import ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.targets import Target

CAST_SHAPES = ((8192, 4096), (8192, 14336))
DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
COMPILED_TOKENS = (1, 8, 32)
"""Each of them takes a compile."""


def casts(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """Each cast of each shape, alone and with its producer, beside its estimate and the producer in BF16."""
    for m, n in CAST_SHAPES:
        for graph in gpu_graphs.casts(m, n, target):
            yield cast_row(graph, f"{m}x{n}", target, repeats)


def cast_row(graph: gpu_graphs.Graph, shape: str, target: Target, repeats: int) -> dict[str, Any]:
    """The generated code of one graph, timed."""
    torch._dynamo.reset()
    predicted = graph.predicted(target).step
    inputs = [graph.inputs() for _ in range(copies_for(predicted.num_bytes))]
    compiled, plain = graph.compiled(), torch.compile(graph.plain, dynamic=False)
    if graph.exact:
        for found, wanted in zip(compiled(*inputs[0]), graph.compute(*inputs[0]), strict=True):
            check_bits(found, wanted, graph.name)
    runs: dict[str, Sequence[Call]] = {
        graph.name: [lambda given=given: compiled(*given) for given in inputs],
        "baseline": [lambda given=given: plain(*given) for given in inputs],
    }
    times = gpu_common.graph_times(runs, repeats)
    time = times[graph.name]
    return {
        **row("casts", graph.name, shape, times, "its source in BF16 (Inductor)"),
        **gpu_common.bandwidth(time, target.peak, predicted.num_bytes),
        "predicted_us": round(predicted.us, 2),
        "over_predicted": round(time / predicted.us, 3) if predicted.us else None,
    }


def compiled_layers(weights: Sequence[Any]) -> list[Callable[[Tensor], Tensor]]:
    """A compiled layer for each weight; all run the same code."""
    torch._dynamo.reset()
    options = {"policy": {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}}
    layers = [gpu_graphs.StoredLinear(*weight) for weight in weights]
    return [torch.compile(layer, backend="mxfp8", dynamic=False, options=options) for layer in layers]


@torch.no_grad()
def decode(target: Target, repeats: int) -> Iterator[dict[str, Any]]:
    """Weight-only products of few tokens over cuBLAS in BF16."""
    for n, k in (*LAYERS["llama-8b"], *LAYERS["llama-70b"]):
        dense, weights = quantized(n, k, copies_for(n * k), ScaleLayout.ROW_MAJOR)
        for m in DECODE_TOKENS:
            x = torch.randn(m, k, device=gpu_common.DEVICE).bfloat16()
            torch._dynamo.reset()
            product = torch.compile(gpu_graphs.weight_only, dynamic=False)
            check_product(product(x, *weights[0]), x, values(weights[0]), "weight_only_mm")
            runs: dict[str, Sequence[Call]] = {
                "baseline": [lambda w=w, x=x: x @ w.t() for w in dense],
                "weight_only_mm": [lambda w=w, x=x, run=product: run(x, *w) for w in weights],
            }
            if m in COMPILED_TOKENS:
                layers = compiled_layers(weights)
                seen = ops.quantize_dequantize(x, -1, weights[0][0].dtype, "rceil", False, x.dtype)
                check_product(layers[0](x), seen, values(weights[0]), "compiled layer")
                runs["compiled layer"] = [lambda layer=layer, x=x: layer(x) for layer in layers]
            times = gpu_common.graph_times(runs, repeats)
            for kernel in list(runs)[1:]:
                read = gpu_common.bandwidth(times[kernel], target.peak, n * k * 33 / 32)
                yield row("decode", kernel, f"{m}x{n}x{k}", times, "torch.mm (bfloat16)") | read


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
    gpu_common.register()
    target = targets.of_device(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for part in arguments.part:
        try:
            rows += tqdm(PARTS[part](target, arguments.repeats), desc=part)
        except TargetError as error:
            print(f"{part}: skipped, {error}")
    if rows:
        show(rows)
        found = gpu_common.device()
        write("gpu_kernels", [row | found for row in rows])


if __name__ == "__main__":
    main()
