"""GEMMs of Llama's and Qwen's linear layers on the GPU of this machine, beside the vendor's and torchao's.

    products   operands at hand: torch.mm in BF16 (the baseline), torch._scaled_mm in FP8, one scale a tensor;
               where the chip has an MX GEMM also ours in every form, and torch._scaled_mm in MX
    linears    forward and backward of one compiled layer, casts included: BF16, mxcompile, torchao

Products of few tokens are first compared with an FP64 reference. Times are medians of alternating rounds.
Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from common import show, torchao_model, write
from gpu_common import (
    LAYERS,
    alternate,
    check_product,
    copies_for,
    device,
    graph_times,
    product_row,
    quantized,
)
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.formats import Format, ScaleLayout
from mxcompile.lowering import targets
from mxcompile.lowering.targets import Target

TOKENS = (1, 16, 128, 1024, 4096, 16384)
LINEAR_TOKENS = 4096
_CHECKED = 256
"""Tokens: the FP64 reference of more takes longer than all measurements."""


def products(target: Target, model: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Every form that runs on `target`, for every layer and number of tokens."""
    from mxcompile.lowering.reference.scaled_mm import scaled_mm as reference

    for n, k in LAYERS[model]:
        dense, weights = quantized(n, k, copies_for(2 * n * k), target.scale_layout, target)
        for m in TOKENS:
            xs, operands = quantized(m, k, len(dense), target.scale_layout, target)
            ours = _forms(xs, operands, weights, target) if target.native else {}
            if m <= _CHECKED and ours:
                a, b = operands[0], weights[0]
                wanted = reference(a.qdata, a.scale, b.qdata, b.scale, None)
                for name, plans in ours.items():
                    plans[0][0].run()
                    check_product(plans[0][1], *wanted, k, name)
            runs = {name: [launch.run for launch, _ in plans] for name, plans in ours.items()}
            runs["baseline"] = [lambda x=x, w=w: x @ w.t() for x, w in zip(xs, dense, strict=True)]
            vendor = _vendor(operands, weights, target)
            times = graph_times(runs | vendor, repeats)
            for name in [*ours, *vendor]:
                yield {"model": model} | product_row("products", name, (m, n, k), times)


def _forms(
    xs: list[Tensor], operands: list[Any], weights: list[Any], target: Target
) -> dict[str, list[tuple[Any, Tensor]]]:
    """Our kernels that can run the products: one plan for each pair of operands."""
    from mxcompile.lowering.kernels import fused_quantize_mm, scaled_mm, scaled_mm_tiled
    from mxcompile.lowering.kernels.configs import tiled_configs

    out, fmt = torch.bfloat16, Format()
    pairs = list(zip(operands, weights, strict=True))
    forms = {"scaled_mm": [scaled_mm.plan(*pair, None, out, target) for pair in pairs]}
    if target.scale_layout is ScaleLayout.TILED_128X4 and scaled_mm_tiled.fits(*pairs[0], out):
        for choice in range(len(tiled_configs(target))):
            plans = [scaled_mm_tiled.plan(*pair, None, out, target, choice) for pair in pairs]
            forms[f"scaled_mm_tiled {choice}"] = plans
    sources = zip(xs, weights, strict=True)
    return forms | {
        "fused_quantize_mm": [fused_quantize_mm.plan(x, w, None, fmt, out, target) for x, w in sources]
    }


def _vendor(operands: list[Any], weights: list[Any], target: Target) -> dict[str, list[Any]]:
    """torch._scaled_mm on the same elements: FP8 with one scale a tensor; MX where it takes such scales."""
    one = torch.ones((), device="cuda")
    pairs = list(zip(operands, weights, strict=True))
    candidates = {
        "torch._scaled_mm (fp8, a scale a tensor)": [(a.qdata, b.qdata.t(), one, one) for a, b in pairs]
    }
    if target.scale_layout is ScaleLayout.TILED_128X4:
        e8m0 = torch.float8_e8m0fnu
        candidates["torch._scaled_mm (mxfp8)"] = [
            (a.qdata, b.qdata.t(), a.scale.view(e8m0), b.scale.view(e8m0)) for a, b in pairs
        ]
    runs = {}
    for name, arguments in candidates.items():
        try:
            torch._scaled_mm(*arguments[0], out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError) as error:
            print(f"{name}: left out for {tuple(arguments[0][0].shape)}: {str(error).splitlines()[0]}")
            continue
        runs[name] = [
            lambda given=given: torch._scaled_mm(*given, out_dtype=torch.bfloat16) for given in arguments
        ]
    return runs


def linears(target: Target, model: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A layer compiled by itself, forward and backward."""
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    for n, k in LAYERS[model]:
        torch._dynamo.reset()
        layer = nn.Sequential(nn.Linear(k, n, bias=False)).to("cuda", torch.bfloat16)
        x = torch.randn(LINEAR_TOKENS, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(LINEAR_TOKENS, n, device="cuda", dtype=torch.bfloat16)
        compiled = {
            "baseline": torch.compile(layer),
            "mxcompile": torch.compile(layer, backend="mxfp8", options={"policy": policy}),
        }
        try:
            converted = torchao_model(layer, emulated=not target.native)
            compiled["torchao" if target.native else "torchao (emulated)"] = torch.compile(converted)
        except ImportError as error:
            print(f"torchao left out: {error}")
        runs = {
            name: lambda run=run, x=x, dy=dy: torch.autograd.grad(run(x), [x, *run.parameters()], dy)
            for name, run in compiled.items()
        }
        times = alternate(runs, repeats)
        for name in compiled:
            row = product_row("linears", name, (LINEAR_TOKENS, n, k), times, gemms=3)
            yield {"model": model} | row | {"baseline": "compiled layer (bfloat16)"}


PARTS = {"products": products, "linears": linears}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    parser.add_argument("--model", choices=LAYERS, nargs="+", default=list(LAYERS), help="whose layers")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped {', '.join(options.part)}: no CUDA or ROCm device here; nothing was measured")
        return
    target = targets.of_device(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for part in options.part:
        for model in options.model:
            rows += tqdm(PARTS[part](target, model, options.repeats), desc=f"{part} {model}")
    show(rows)
    write("gpu_gemms", [row | device() for row in rows])


if __name__ == "__main__":
    main()
